#include "server/group/rendezvous.h"

#include <algorithm>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "server/group/group.h"

namespace emberd::group {
namespace {

// A sleep is measured by the wall clock. Should somebody set that, deadlines are late by this much
// at most.
constexpr absl::Duration kMaxSleep = absl::Seconds(1);

// Far enough from 0, and from the end of the numbers.
uint64_t RandomGeneration() {
  return absl::Uniform<uint64_t>(absl::BitGen(), uint64_t{1} << 40, uint64_t{1} << 62);
}

absl::Status InGroup(const GroupId& id, const absl::Status& status) {
  return Annotate(status, absl::StrCat("group '", id.group, "'"));
}

}  // namespace

Rendezvous::LockedEvent::LockedEvent(Rendezvous* host) : mutex_(&host->mutex_) {
  mutex_->Lock();
  now = host->clock_();
  ticket = ++host->last_ticket_;
  last_generation = &host->last_generation_;
}

Rendezvous::LockedEvent::~LockedEvent() {
  mutex_->Unlock();
  for (const auto& answer : answers) answer();
}

Rendezvous::Rendezvous(RendezvousOptions options)
    : options_(std::move(options)),
      clock_(options_.clock ? options_.clock : SteadyNow),
      last_generation_(options_.last_generation != 0 ? options_.last_generation
                                                     : RandomGeneration()) {
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

Withdraw Rendezvous::Join(const internal::v1::JoinRequest& request, JoinDone done) {
  const GroupId id = IdOf(request.name());
  return OnCall(id, done, [&](Event* event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> absl::Status {
    RETURN_IF_ERROR(CheckGroupOptions(request.options()));
    RETURN_IF_ERROR(CheckRank(request.rank(), request.options().size()));
    ASSIGN_OR_RETURN(const Groups::iterator found,
                     FindOrCreate(id, request.options(), request.history(), event));
    Group& group = *found->second.group;
    group.Touch(event->now);
    group.Join(request, std::move(done), event);
    Settle(found);
    return absl::OkStatus();
  });
}

Withdraw Rendezvous::AllGather(internal::v1::AllGatherRequest request, GatherDone done) {
  const auto work = [&](Group& group, Event* event)
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> absl::Status {
    RETURN_IF_ERROR(CheckExchange(request));
    const auto bytes = static_cast<int64_t>(request.value().size());
    if (value_bytes_ + bytes > options_.max_value_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "value has ", bytes, " bytes in addition to the ", value_bytes_,
          " that are held already; at most ", options_.max_value_bytes, " are allowed"));
    }
    group.AllGather(std::move(request), std::move(done), event);
    return absl::OkStatus();
  };
  return OnMember(request, done, work);
}

Withdraw Rendezvous::Advance(const internal::v1::AdvanceRequest& request, StatusDone done) {
  return OnMember(request, done, [&](Group& group, Event* event) -> absl::Status {
    RETURN_IF_ERROR(CheckAdvance(request));
    group.Advance(request, std::move(done), event);
    return absl::OkStatus();
  });
}

Withdraw Rendezvous::Watch(const internal::v1::WatchRequest& request, StatusDone done) {
  return OnMember(request, done, [&](Group& group, Event* event) {
    group.Watch(request.generation(), request.rank(), std::move(done), event);
    return absl::OkStatus();
  });
}

template <typename Request, typename Done, typename Work>
Withdraw Rendezvous::OnMember(const Request& request, const Done& done, const Work& work) {
  const GroupId id = IdOf(request.name());
  return OnCall(id, done, [&](Event* event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> absl::Status {
    const auto found = groups_.find(id);
    if (found == groups_.end()) {
      return absl::AbortedError(
          absl::StrCat("generation ", request.generation(), " is not known here; join again"));
    }
    Group& group = *found->second.group;
    RETURN_IF_ERROR(CheckRank(request.rank(), group.options().size()));
    group.Touch(event->now);
    absl::Status status = work(group, event);
    Settle(found);
    return status;
  });
}

template <typename Done, typename Work>
Withdraw Rendezvous::OnCall(const GroupId& id, const Done& done, const Work& work) {
  LockedEvent event(this);
  absl::Status status = CheckOpen(id);
  if (status.ok()) status = InGroup(id, work(&event));
  if (!status.ok()) Answer(done, status, &event.answers);
  return [this, id, ticket = event.ticket](const absl::Status& status) {
    const absl::Status end = InGroup(id, status);
    OnGroup(id, [&](Group& group, Event* now) { group.Withdraw(ticket, end, now); });
  };
}

void Rendezvous::OnGroup(const GroupId& id, const std::function<void(Group&, Event*)>& work) {
  LockedEvent event(this);
  const auto found = groups_.find(id);
  if (found == groups_.end()) return;
  work(*found->second.group, &event);
  Settle(found);
}

Withdraw Rendezvous::Leave(const internal::v1::LeaveRequest& request, const StatusDone& done) {
  const GroupId id = IdOf(request.name());
  const absl::Status status = CheckGroupName("name.group", id.group);
  if (status.ok()) {
    OnGroup(id, [&](Group& group, Event* event) {
      if (!CheckRank(request.rank(), group.options().size()).ok()) return;
      group.Touch(event->now);
      group.Leave(request, event);
    });
  }
  done(status);
  return nullptr;  // it never waits
}

bool Rendezvous::Adopt(const GroupId& id, uint64_t generation, const v1::GroupOptions& options) {
  LockedEvent event(this);
  // The group's host has compared the options of this generation already.
  const auto here = groups_.find(id);
  if (here != groups_.end() && !CheckSameOptions(options, here->second.group->options()).ok())
    Forget(here, &event);
  const auto found = FindOrCreate(id, options, /*history=*/0, &event);
  if (!CheckOpen(id).ok() || !found.ok()) return false;
  Group& group = *(*found)->second.group;
  group.Touch(event.now);
  group.Adopt(generation, &event);
  Settle(*found);
  return true;
}

bool Rendezvous::Knows(const GroupId& id, uint64_t generation) const {
  absl::MutexLock lock(&mutex_);
  const auto found = groups_.find(id);
  return found != groups_.end() && found->second.group->Knows(generation);
}

void Rendezvous::End(const GroupId& id, uint64_t generation, const absl::Status& status) {
  OnGroup(id, [&](Group& group, Event* event) { group.End(generation, status, event); });
}

absl::Status Rendezvous::Forget(const GroupId& id) {
  LockedEvent event(this);
  const auto found = groups_.find(id);
  if (found == groups_.end()) return absl::OkStatus();
  const Group& group = *found->second.group;
  if (!group.vacant() && !Forgettable(group, event.now)) {
    return InGroup(id, absl::FailedPreconditionError(
                           "some of its ranks are active; drop it when they have left"));
  }
  Forget(found, &event);
  return absl::OkStatus();
}

void Rendezvous::Close(const absl::Status& status) {
  LockedEvent event(this);
  if (!closed_.ok()) return;
  closed_ = status;
  while (!groups_.empty()) Forget(groups_.begin(), &event);
}

void Rendezvous::ExpireNow() {
  LockedEvent event(this);
  while (!timers_.empty() && timers_.begin()->first <= event.now) {
    const auto found = groups_.find(timers_.begin()->second);
    Group& group = *found->second.group;
    group.Expire(&event);
    if (group.vacant() && group.idle_deadline() <= event.now) {
      Forget(found, &event);
    } else {
      Settle(found);
    }
  }
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

absl::Status Rendezvous::CheckOpen(const GroupId& id) const {
  RETURN_IF_ERROR(CheckGroupName("name.group", id.group));
  return InGroup(id, closed_);
}

absl::StatusOr<Rendezvous::Groups::iterator> Rendezvous::FindOrCreate(
    const GroupId& id, const v1::GroupOptions& options, uint64_t history, Event* event) {
  auto found = groups_.find(id);
  if (found != groups_.end()) {
    const Group& group = *found->second.group;
    uint64_t& before = found->second.history;
    const bool other_rows = history != 0 && before != 0 && history != before;
    absl::Status same = CheckSameOptions(options, group.options());
    if (same.ok() && !other_rows) {
      if (before == 0) before = history;  // coordinators of an older version do not say
      return found;
    }
    // Members of whom nothing has been heard for long do not stand in the way of a new run, nor do
    // those whose rows are gone.
    if (!other_rows && !Forgettable(group, event->now) && !group.vacant()) return same;
    Forget(found, event, other_rows ? "its model has other rows now" : "it was idle");
  }
  if (static_cast<int>(groups_.size()) >= options_.max_groups) {
    RETURN_IF_ERROR(MakeRoom(event));
  }
  Entry entry;
  entry.group = options.consistency() == v1::SYNC ? MakeSyncGroup(id, options, event->now)
                                                  : MakeProgressGroup(id, options, event->now);
  entry.history = history;
  return groups_.emplace(id, std::move(entry)).first;
}

bool Rendezvous::Forgettable(const Group& group, absl::Time now) {
  const GroupLoad load = group.load();
  return load.joining == 0 && load.waiting == 0 && group.idle_deadline() <= now;
}

absl::Status Rendezvous::MakeRoom(Event* event) {
  auto idlest = groups_.end();
  for (auto group = groups_.begin(); group != groups_.end(); ++group) {
    const Group& candidate = *group->second.group;
    if (!candidate.vacant() && !Forgettable(candidate, event->now)) continue;
    if (idlest == groups_.end() || candidate.last_call() < idlest->second.group->last_call())
      idlest = group;
  }
  if (idlest == groups_.end()) {
    return absl::ResourceExhaustedError(absl::StrCat(groups_.size(),
                                                     " groups are active here already; at most ",
                                                     options_.max_groups, " are allowed"));
  }
  Forget(idlest, event);
  return absl::OkStatus();
}

void Rendezvous::Forget(Groups::iterator group, Event* event, absl::string_view why) {
  Entry& entry = group->second;
  const absl::Status over = absl::AbortedError(absl::StrCat(why, "; join again"));
  entry.group->Close(InGroup(group->first, closed_.ok() ? over : closed_), event);
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

}  // namespace emberd::group
