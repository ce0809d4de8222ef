// A SYNC group: all ranks join, and are then members of one generation until one of them leaves,
// joins again or misses a deadline.
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/group/exchange_table.h"
#include "server/group/group.h"

namespace emberd::group {
namespace {

namespace pb = internal::v1;

class SyncGroup final : public Group {
 public:
  SyncGroup(const GroupId& id, const v1::GroupOptions& options, absl::Time now)
      : Group(id, options, now) {}

  void Join(const pb::JoinRequest& request, Collective::JoinDone done, Event* event) override;
  void Leave(const pb::LeaveRequest& request, Event* event) override;
  void AllGather(pb::AllGatherRequest request, Collective::GatherDone done, Event* event) override;
  void Watch(uint64_t generation, int rank, Collective::StatusDone done, Event* event) override;
  void Adopt(uint64_t generation, Event* event) override;
  void End(uint64_t generation, const absl::Status& status, Event* event) override;
  bool Knows(uint64_t generation) const override;
  void Withdraw(Ticket ticket, const absl::Status& status, Event* event) override;
  void Expire(Event* event) override;
  void Close(const absl::Status& status, Event* event) override;
  bool vacant() const override { return joining_.empty() && !live(); }
  GroupLoad load() const override;
  absl::Time deadline() const override;

 private:
  struct Joining : Waiting<Collective::JoinDone> {
    std::string coordinator;
    absl::Time deadline;
  };
  struct Watching : Waiting<Collective::StatusDone> {
    int rank = 0;
  };
  struct Generation {
    Generation(uint64_t number, std::string owner, int size, absl::Duration timeout)
        : number(number), exchanges(std::move(owner), size, timeout) {}

    const uint64_t number;
    absl::Status end;  // OK: it lives
    ExchangeTable exchanges;
    std::optional<int64_t> step;  // the highest that a member has come to
    std::vector<Watching> watches;
  };

  void Begin(uint64_t generation);
  bool live() const { return generation_.has_value() && generation_->end.ok(); }
  // " in step 17", for errors; empty before the first exchange.
  std::string InStep() const;
  void EndLive(const absl::Status& status, Event* event);
  // Ends what lives. `why`: may be empty.
  void EndByLeave(int rank, const std::string& why, Event* event);
  void ExpireJoins(Event* event);

  std::map<int, Joining> joining_;        // by rank
  std::optional<Generation> generation_;  // the newest; nothing is live while somebody joins
};

void SyncGroup::Adopt(uint64_t generation, Event* event) {
  if (generation_.has_value() && HasBeen(generation, generation_->number)) return;
  if (live()) EndLive(OverError(generation_->number), event);
  Begin(generation);
}

void SyncGroup::End(uint64_t generation, const absl::Status& status, Event* event) {
  if (live() && generation_->number == generation) EndLive(status, event);
}

bool SyncGroup::Knows(uint64_t generation) const {
  return generation_.has_value() && generation_->number == generation;
}

void SyncGroup::Join(const pb::JoinRequest& request, Collective::JoinDone done, Event* event) {
  const absl::Status again =
      Error(absl::StatusCode::kAborted, absl::StrCat("rank ", request.rank(), " joined again",
                                                     live() ? InStep() : "", "; join again"));
  if (live()) EndLive(again, event);
  if (const auto before = joining_.find(request.rank()); before != joining_.end()) {
    Answer(std::move(before->second.done), again, &event->answers);
    joining_.erase(before);
  }
  joining_[request.rank()] = {
      {event->ticket, std::move(done)}, request.coordinator(), event->now + step_timeout()};
  if (static_cast<int>(joining_.size()) < size()) return;

  pb::JoinResponse membership;
  membership.set_generation(event->NextGeneration());
  for (const auto& [rank, joining] : joining_) membership.add_coordinators(joining.coordinator);
  for (auto& [rank, joining] : joining_)
    Answer(std::move(joining.done), membership, &event->answers);
  joining_.clear();
  Begin(membership.generation());
}

void SyncGroup::AllGather(pb::AllGatherRequest request, Collective::GatherDone done, Event* event) {
  if (!Knows(request.generation())) {
    Answer(std::move(done), OverError(request.generation()), &event->answers);
    return;
  }
  if (live()) {
    const int64_t step = request.instance_key();
    generation_->step = std::max(generation_->step.value_or(step), step);
    generation_->exchanges.Contribute(std::move(request), std::move(done), event);
  } else {
    generation_->exchanges.ContributeLate(request, generation_->end, std::move(done), event);
  }
}

void SyncGroup::Leave(const pb::LeaveRequest& request, Event* event) {
  if (!live() || generation_->number != request.generation()) return;
  EndByLeave(request.rank(), request.finished() ? "it has done all its steps" : request.reason(),
             event);
}

void SyncGroup::EndByLeave(int rank, const std::string& why, Event* event) {
  EndLive(Error(absl::StatusCode::kAborted,
                absl::StrCat("rank ", rank, " left", InStep(),
                             why.empty() ? "" : absl::StrCat(" (", why, ")"), "; join again")),
          event);
}

void SyncGroup::Watch(uint64_t generation, int rank, Collective::StatusDone done, Event* event) {
  const int most = 4 * size();
  absl::Status refused;
  if (!Knows(generation)) {
    refused = OverError(generation);
  } else if (!live()) {
    refused = generation_->end;
  } else if (static_cast<int>(generation_->watches.size()) >= most) {
    refused = Error(absl::StatusCode::kResourceExhausted,
                    absl::StrCat(generation_->watches.size(), " calls watch it already; at most ",
                                 most, " are allowed"));
  }
  if (refused.ok()) {
    generation_->watches.push_back({{event->ticket, std::move(done)}, rank});
  } else {
    Answer(std::move(done), refused, &event->answers);
  }
}

void SyncGroup::Withdraw(Ticket ticket, const absl::Status& status, Event* event) {
  for (auto joining = joining_.begin(); joining != joining_.end(); ++joining) {
    if (joining->second.ticket != ticket) continue;
    Answer(std::move(joining->second.done), status, &event->answers);
    joining_.erase(joining);
    return;
  }
  if (!generation_.has_value()) return;
  if (generation_->exchanges.Withdraw(ticket, status, &event->answers)) return;
  for (const Watching& watch : generation_->watches) {
    if (watch.ticket != ticket) continue;
    const int rank = watch.rank;
    WithdrawFrom(&generation_->watches, ticket, status, &event->answers);
    return EndByLeave(rank, "its coordinator is gone", event);
  }
}

void SyncGroup::Expire(Event* event) {
  ExpireJoins(event);
  if (!live() || generation_->exchanges.deadline() > event->now) return;
  const ExchangeTable& exchanges = generation_->exchanges;
  const ExchangeKey key = exchanges.overdue_key();
  EndLive(Error(absl::StatusCode::kDeadlineExceeded,
                absl::StrCat(RankList(exchanges.missing_ranks()), " did not come to exchange ",
                             key.group_key, " of step ", key.instance_key, " within ",
                             options_.step_timeout_ms(), " ms; join again")),
          event);
}

void SyncGroup::ExpireJoins(Event* event) {
  std::vector<int> missing;
  for (int rank = 0; rank < size(); ++rank) {
    if (!joining_.contains(rank)) missing.push_back(rank);
  }
  for (auto joining = joining_.begin(); joining != joining_.end();) {
    if (joining->second.deadline > event->now) {
      ++joining;
      continue;
    }
    Answer(std::move(joining->second.done),
           Error(absl::StatusCode::kDeadlineExceeded,
                 absl::StrCat(RankList(missing), " did not join within ",
                              options_.step_timeout_ms(), " ms")),
           &event->answers);
    joining = joining_.erase(joining);
  }
}

void SyncGroup::Close(const absl::Status& status, Event* event) {
  for (auto& [rank, joining] : joining_) Answer(std::move(joining.done), status, &event->answers);
  joining_.clear();
  if (live()) EndLive(status, event);
}

GroupLoad SyncGroup::load() const {
  GroupLoad load;
  load.joining = joining_.size();
  if (!generation_.has_value()) return load;
  load.waiting = generation_->exchanges.waiting() + generation_->watches.size();
  load.open_exchanges = generation_->exchanges.open();
  load.kept_exchanges = generation_->exchanges.kept();
  load.value_bytes = generation_->exchanges.bytes();
  return load;
}

absl::Time SyncGroup::deadline() const {
  absl::Time first = live() ? generation_->exchanges.deadline() : absl::InfiniteFuture();
  for (const auto& [rank, joining] : joining_) first = std::min(first, joining.deadline);
  return first;
}

void SyncGroup::Begin(uint64_t generation) {
  generation_.emplace(generation, name(), size(), step_timeout());
}

std::string SyncGroup::InStep() const {
  return generation_->step.has_value() ? absl::StrCat(" in step ", *generation_->step) : "";
}

void SyncGroup::EndLive(const absl::Status& status, Event* event) {
  generation_->end = status;
  generation_->exchanges.End(status, &event->answers);
  for (auto& watch : generation_->watches) Answer(std::move(watch.done), status, &event->answers);
  generation_->watches.clear();
}

}  // namespace

std::unique_ptr<Group> MakeSyncGroup(const GroupId& id, const v1::GroupOptions& options,
                                     absl::Time now) {
  return std::make_unique<SyncGroup>(id, options, now);
}

}  // namespace emberd::group
