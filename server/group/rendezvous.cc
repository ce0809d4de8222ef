#include "server/group/rendezvous.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/group/group_checks.h"
#include "server/group/sync_group.h"

namespace emberd::server {
namespace {

// A sleep is measured by the wall clock. Should somebody set that, deadlines are late by this much
// at most.
constexpr absl::Duration kMaxSleep = absl::Seconds(1);

std::function<absl::Time()> SteadyClock() {
  return [start = absl::Now(), begin = std::chrono::steady_clock::now()] {
    return start + absl::FromChrono(std::chrono::steady_clock::now() - begin);
  };
}

absl::Status InGroup(const GroupId& id, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("group '", id.group, "': ", status.message()));
}

absl::Status NotHere(const GroupId& id, uint64_t generation) {
  return InGroup(id, absl::AbortedError(absl::StrCat("generation ", generation,
                                                     " is not known here; join again")));
}

template <typename Callback>
void AnswerLater(Callback done, const absl::Status& status, Turn* turn) {
  turn->answers.push_back([done = std::move(done), status] { done(status); });
}

void Carry(const Turn& turn) {
  for (const auto& answer : turn.answers) answer();
}

}  // namespace

Rendezvous::Rendezvous(RendezvousOptions options)
    : options_(std::move(options)), clock_(options_.clock ? options_.clock : SteadyClock()) {
  if (!options_.clock) timer_thread_ = std::thread([this] { RunTimers(); });
}

Rendezvous::~Rendezvous() {
  Close(absl::UnavailableError("the host of the group is going away"));
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    timers_changed_.Signal();
  }
  if (timer_thread_.joinable()) timer_thread_.join();
}

Rendezvous::Call Rendezvous::Join(const GroupId& id, int rank, const v1::GroupOptions& options,
                                  const std::string& coordinator, JoinCallback done) {
  Turn turn;
  {
    absl::MutexLock lock(&mutex_);
    turn = NewTurn();
    absl::Status status = CheckOpen(id);
    status.Update(CheckGroupOptions(id, options));
    status.Update(CheckRank(id, rank, options.size()));
    const absl::StatusOr<Groups::iterator> found =
        status.ok() ? FindOrCreate(id, options, &turn) : status;
    if (found.ok()) {
      Group& group = *(*found)->second.group;
      group.Touch(turn.now);
      group.Join(rank, coordinator, std::move(done), &turn);
      Settle(*found);
    } else {
      AnswerLater(std::move(done), found.status(), &turn);
    }
  }
  Carry(turn);
  return {id, turn.ticket};
}

Rendezvous::Call Rendezvous::AllGather(const GroupId& id, ExchangeCall call, GatherCallback done) {
  return OnMember(
      id, call.generation, call.rank, std::move(done),
      [&](Group& group, GatherCallback& answer, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        absl::Status status = CheckExchange(id, call);
        const auto bytes = static_cast<int64_t>(call.value.size());
        if (status.ok() && value_bytes_ + bytes > options_.max_value_bytes) {
          status =
              group.Error(absl::StatusCode::kResourceExhausted,
                          absl::StrCat("a value of ", bytes, " bytes beside the ", value_bytes_,
                                       " held; at most ", options_.max_value_bytes, " may be"));
        }
        if (status.ok()) {
          group.AllGather(std::move(call), std::move(answer), turn);
        } else {
          AnswerLater(std::move(answer), status, turn);
        }
      });
}

Rendezvous::Call Rendezvous::Advance(const GroupId& id, const AdvanceCall& call,
                                     StatusCallback done) {
  return OnMember(id, call.generation, call.rank, std::move(done),
                  [&](Group& group, StatusCallback& answer, Turn* turn) {
                    if (absl::Status status = CheckAdvance(id, call); !status.ok()) {
                      AnswerLater(std::move(answer), status, turn);
                    } else {
                      group.Advance(call, std::move(answer), turn);
                    }
                  });
}

Rendezvous::Call Rendezvous::Watch(const GroupId& id, uint64_t generation, StatusCallback done) {
  return OnMember(id, generation, /*rank=*/0, std::move(done),
                  [&](Group& group, StatusCallback& answer, Turn* turn) {
                    group.Watch(generation, std::move(answer), turn);
                  });
}

template <typename Callback, typename Work>
Rendezvous::Call Rendezvous::OnMember(const GroupId& id, uint64_t generation, int rank,
                                      Callback done, const Work& work) {
  Turn turn;
  {
    absl::MutexLock lock(&mutex_);
    turn = NewTurn();
    absl::Status status = CheckOpen(id);
    const auto found = groups_.find(id);
    if (status.ok() && found == groups_.end()) status = NotHere(id, generation);
    if (status.ok()) status = CheckRank(id, rank, found->second.group->options().size());
    if (status.ok()) {
      found->second.group->Touch(turn.now);
      work(*found->second.group, done, &turn);
      Settle(found);
    } else {
      AnswerLater(std::move(done), status, &turn);
    }
  }
  Carry(turn);
  return {id, turn.ticket};
}

void Rendezvous::OnGroup(const GroupId& id, const std::function<void(Group&, Turn*)>& work) {
  Turn turn;
  {
    absl::MutexLock lock(&mutex_);
    turn = NewTurn();
    const auto found = groups_.find(id);
    if (found == groups_.end()) return;
    work(*found->second.group, &turn);
    Settle(found);
  }
  Carry(turn);
}

absl::Status Rendezvous::Leave(const GroupId& id, uint64_t generation, int rank,
                               const std::string& reason, bool finished) {
  if (absl::Status status = CheckGroupName(id); !status.ok()) return status;
  OnGroup(id, [&](Group& group, Turn* turn) {
    if (!CheckRank(id, rank, group.options().size()).ok()) return;
    group.Touch(turn->now);
    group.Leave(generation, rank, reason, finished, turn);
  });
  return absl::OkStatus();
}

void Rendezvous::Withdraw(const Call& call, const absl::Status& status) {
  OnGroup(call.id, [&](Group& group, Turn* turn) { group.Withdraw(call.ticket, status, turn); });
}

bool Rendezvous::Adopt(const GroupId& id, uint64_t generation, const v1::GroupOptions& options) {
  Turn turn;
  bool adopted = false;
  {
    absl::MutexLock lock(&mutex_);
    turn = NewTurn();
    // The group's host has compared the options of this generation already.
    const auto here = groups_.find(id);
    if (here != groups_.end() && !CheckSameOptions(id, options, here->second.group->options()).ok())
      Forget(here, &turn);
    const auto found = FindOrCreate(id, options, &turn);
    if (CheckOpen(id).ok() && found.ok()) {
      Group& group = *(*found)->second.group;
      group.Touch(turn.now);
      static_cast<SyncGroup&>(group).Adopt(generation, &turn);
      Settle(*found);
      adopted = true;
    }
  }
  Carry(turn);
  return adopted;
}

bool Rendezvous::Knows(const GroupId& id, uint64_t generation) const {
  absl::MutexLock lock(&mutex_);
  const auto found = groups_.find(id);
  if (found == groups_.end()) return false;
  const auto* group = dynamic_cast<const SyncGroup*>(found->second.group.get());
  return group != nullptr && group->Knows(generation);
}

void Rendezvous::End(const GroupId& id, uint64_t generation, const absl::Status& status) {
  OnGroup(id, [&](Group& group, Turn* turn) {
    if (auto* sync = dynamic_cast<SyncGroup*>(&group); sync != nullptr)
      sync->End(generation, status, turn);
  });
}

void Rendezvous::Close(const absl::Status& status) {
  Turn turn;
  {
    absl::MutexLock lock(&mutex_);
    if (!closed_.ok()) return;
    closed_ = status;
    turn = NewTurn();
    while (!groups_.empty()) Forget(groups_.begin(), &turn);
  }
  Carry(turn);
}

void Rendezvous::ExpireNow() {
  Turn turn;
  {
    absl::MutexLock lock(&mutex_);
    turn = NewTurn();
    while (!timers_.empty() && timers_.begin()->first <= turn.now) {
      const auto found = groups_.find(timers_.begin()->second);
      Group& group = *found->second.group;
      group.Expire(&turn);
      if (group.vacant() && group.idle_deadline() <= turn.now) {
        Forget(found, &turn);
      } else {
        Settle(found);
      }
    }
  }
  Carry(turn);
}

Rendezvous::Load Rendezvous::load() const {
  absl::MutexLock lock(&mutex_);
  Load sum;
  sum.groups = groups_.size();
  for (const auto& [id, entry] : groups_) {
    const GroupLoad load = entry.group->load();
    sum.joining += load.joining;
    sum.waiting += load.waiting;
    sum.open_exchanges += load.open_exchanges;
    sum.kept_exchanges += load.kept_exchanges;
    sum.value_bytes += load.value_bytes;
  }
  return sum;
}

Turn Rendezvous::NewTurn() {
  Turn turn;
  turn.now = clock_();
  turn.ticket = ++last_ticket_;
  turn.last_generation = &last_generation_;
  return turn;
}

absl::Status Rendezvous::CheckOpen(const GroupId& id) const {
  if (absl::Status status = CheckGroupName(id); !status.ok()) return status;
  return closed_.ok() ? closed_ : InGroup(id, closed_);
}

absl::StatusOr<Rendezvous::Groups::iterator> Rendezvous::FindOrCreate(
    const GroupId& id, const v1::GroupOptions& options, Turn* turn) {
  auto found = groups_.find(id);
  if (found != groups_.end()) {
    const Group& group = *found->second.group;
    absl::Status same = CheckSameOptions(id, options, group.options());
    if (same.ok()) return found;
    // Members of whom nothing has been heard for long do not stand in the way of a new run.
    if (!Forgettable(group, turn->now) && !group.vacant()) return same;
    Forget(found, turn);
  }
  if (static_cast<int>(groups_.size()) >= options_.max_groups) {
    if (absl::Status status = MakeRoom(id, turn); !status.ok()) return status;
  }
  Entry entry;
  entry.group = Group::Create(id, options, turn->now);
  return groups_.emplace(id, std::move(entry)).first;
}

bool Rendezvous::Forgettable(const Group& group, absl::Time now) {
  const GroupLoad load = group.load();
  return load.joining == 0 && load.waiting == 0 && group.idle_deadline() <= now;
}

absl::Status Rendezvous::MakeRoom(const GroupId& id, Turn* turn) {
  auto idlest = groups_.end();
  for (auto group = groups_.begin(); group != groups_.end(); ++group) {
    const Group& candidate = *group->second.group;
    if (!candidate.vacant() && !Forgettable(candidate, turn->now)) continue;
    if (idlest == groups_.end() || candidate.last_call() < idlest->second.group->last_call())
      idlest = group;
  }
  if (idlest == groups_.end()) {
    return InGroup(id, absl::ResourceExhaustedError(absl::StrCat(
                           groups_.size(), " groups are at work here already; at most ",
                           options_.max_groups, " may be")));
  }
  Forget(idlest, turn);
  return absl::OkStatus();
}

void Rendezvous::Forget(Groups::iterator group, Turn* turn) {
  Entry& entry = group->second;
  entry.group->Close(
      InGroup(group->first, closed_.ok() ? absl::AbortedError("it was idle; join again") : closed_),
      turn);
  timers_.erase({entry.timer, group->first});
  value_bytes_ -= entry.value_bytes;
  groups_.erase(group);
}

void Rendezvous::Settle(Groups::iterator group) {
  Entry& entry = group->second;
  const int64_t bytes = entry.group->load().value_bytes;
  value_bytes_ += bytes - entry.value_bytes;
  entry.value_bytes = bytes;

  absl::Time timer = entry.group->deadline();
  if (entry.group->vacant()) timer = std::min(timer, entry.group->idle_deadline());
  if (timer == entry.timer) return;
  timers_.erase({entry.timer, group->first});
  entry.timer = timer;
  if (timer == absl::InfiniteFuture()) return;
  timers_.emplace(timer, group->first);
  if (timer < wakes_at_) timers_changed_.Signal();
}

void Rendezvous::RunTimers() {
  absl::MutexLock lock(&mutex_);
  while (!stopping_) {
    const absl::Time now = clock_();
    wakes_at_ = timers_.empty() ? absl::InfiniteFuture() : timers_.begin()->first;
    if (wakes_at_ > now) {
      timers_changed_.WaitWithTimeout(&mutex_, std::min(wakes_at_ - now, kMaxSleep));
    } else {
      mutex_.Unlock();
      ExpireNow();
      mutex_.Lock();
    }
  }
}

}  // namespace emberd::server
