#include "server/group/sync_group.h"

#include "absl/strings/str_cat.h"

namespace emberd::server {

void SyncGroup::Adopt(uint64_t generation, Turn* turn) {
  if (generation_.has_value() && generation_->number >= generation) return;
  if (live()) EndLive(OverError(generation_->number), turn);
  Begin(generation);
}

void SyncGroup::End(uint64_t generation, const absl::Status& status, Turn* turn) {
  if (live() && generation_->number == generation) EndLive(status, turn);
}

bool SyncGroup::Knows(uint64_t generation) const {
  return generation_.has_value() && generation_->number == generation;
}

void SyncGroup::Join(int rank, const std::string& coordinator, JoinCall::Callback done,
                     Turn* turn) {
  const absl::Status again =
      Error(absl::StatusCode::kAborted,
            absl::StrCat("rank ", rank, " joined again", live() ? InStep() : "", "; join again"));
  if (live()) EndLive(again, turn);
  if (const auto before = joining_.find(rank); before != joining_.end()) {
    before->second.call.Answer(again, &turn->answers);
    joining_.erase(before);
  }
  joining_[rank] = {{turn->ticket, std::move(done)}, coordinator, turn->now + step_timeout()};
  if (static_cast<int>(joining_.size()) < size()) return;

  Membership membership;
  membership.generation = turn->NextGeneration();
  for (const auto& [member, joining] : joining_)
    membership.coordinators.push_back(joining.coordinator);
  for (auto& [member, joining] : joining_) joining.call.Answer(membership, &turn->answers);
  joining_.clear();
  Begin(membership.generation);
}

void SyncGroup::AllGather(ExchangeCall call, GatherCall::Callback done, Turn* turn) {
  if (!Knows(call.generation)) {
    GatherCall{turn->ticket, std::move(done)}.Answer(OverError(call.generation), &turn->answers);
    return;
  }
  ExchangeTable& exchanges = generation_->exchanges;
  if (!live()) {
    exchanges.ContributeLate(call.key, call.rank, call.value, generation_->end, std::move(done),
                             &turn->answers);
    return;
  }
  generation_->step =
      std::max(generation_->step.value_or(call.key.instance_key), call.key.instance_key);
  exchanges.Contribute(call.key, call.rank, std::move(call.value), turn->now, turn->ticket,
                       std::move(done), &turn->answers);
}

void SyncGroup::Advance(const AdvanceCall&, StatusCall::Callback done, Turn* turn) {
  StatusCall{turn->ticket, std::move(done)}.Answer(
      Error(absl::StatusCode::kFailedPrecondition, "it is SYNC; Advance is for BOUNDED groups"),
      &turn->answers);
}

void SyncGroup::Leave(uint64_t generation, int rank, absl::string_view reason, bool finished,
                      Turn* turn) {
  if (!live() || generation_->number != generation) return;
  const absl::string_view why = finished ? "it has done all its steps" : reason;
  EndLive(Error(absl::StatusCode::kAborted,
                absl::StrCat("rank ", rank, " left", InStep(),
                             why.empty() ? "" : absl::StrCat(" (", why, ")"), "; join again")),
          turn);
}

void SyncGroup::Watch(uint64_t generation, StatusCall::Callback done, Turn* turn) {
  StatusCall call{turn->ticket, std::move(done)};
  if (!Knows(generation)) {
    call.Answer(OverError(generation), &turn->answers);
  } else if (!live()) {
    call.Answer(generation_->end, &turn->answers);
  } else if (generation_->watches.size() >= 4 * static_cast<size_t>(size())) {
    call.Answer(Error(absl::StatusCode::kResourceExhausted,
                      absl::StrCat(generation_->watches.size(), " calls watch it already; at most ",
                                   4 * size(), " may")),
                &turn->answers);
  } else {
    generation_->watches.push_back(std::move(call));
  }
}

void SyncGroup::Withdraw(Ticket ticket, const absl::Status& status, Turn* turn) {
  for (auto joining = joining_.begin(); joining != joining_.end(); ++joining) {
    if (joining->second.call.ticket != ticket) continue;
    joining->second.call.Answer(status, &turn->answers);
    joining_.erase(joining);
    return;
  }
  if (!generation_.has_value()) return;
  if (generation_->exchanges.Withdraw(ticket, status, &turn->answers)) return;
  WithdrawFrom(&generation_->watches, ticket, status, turn);
}

void SyncGroup::Expire(Turn* turn) {
  ExpireJoins(turn);
  if (!live() || generation_->exchanges.deadline() > turn->now) return;
  const ExchangeTable& exchanges = generation_->exchanges;
  const ExchangeKey key = exchanges.overdue_key();
  EndLive(Error(absl::StatusCode::kDeadlineExceeded,
                absl::StrCat(RankList(exchanges.missing_ranks()), " did not come to exchange ",
                             key.group_key, " of step ", key.instance_key, " within ",
                             options_.step_timeout_ms(), " ms; join again")),
          turn);
}

void SyncGroup::ExpireJoins(Turn* turn) {
  std::vector<int> missing;
  for (int rank = 0; rank < size(); ++rank) {
    if (!joining_.contains(rank)) missing.push_back(rank);
  }
  for (auto joining = joining_.begin(); joining != joining_.end();) {
    if (joining->second.deadline > turn->now) {
      ++joining;
      continue;
    }
    joining->second.call.Answer(Error(absl::StatusCode::kDeadlineExceeded,
                                      absl::StrCat(RankList(missing), " did not join within ",
                                                   options_.step_timeout_ms(), " ms")),
                                &turn->answers);
    joining = joining_.erase(joining);
  }
}

void SyncGroup::Close(const absl::Status& status, Turn* turn) {
  for (auto& [rank, joining] : joining_) joining.call.Answer(status, &turn->answers);
  joining_.clear();
  if (live()) EndLive(status, turn);
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

void SyncGroup::EndLive(const absl::Status& status, Turn* turn) {
  generation_->end = status;
  generation_->exchanges.End(status, &turn->answers);
  for (StatusCall& watch : generation_->watches) watch.Answer(status, &turn->answers);
  generation_->watches.clear();
}

}  // namespace emberd::server
