#include "server/group/progress_group.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace emberd::server {

ProgressGroup::ProgressGroup(const GroupId& id, const v1::GroupOptions& options, absl::Time now)
    : Group(id, options, now), ranks_(options.size()) {
  for (Rank& rank : ranks_) rank.next_step = options.first_step();
}

void ProgressGroup::Join(int rank, const std::string&, JoinCall::Callback done, Turn* turn) {
  Rank& member = ranks_[rank];
  if (member.present) {
    AnswerAll(rank,
              Error(absl::StatusCode::kAborted,
                    absl::StrCat("rank ", rank, " joined again in step ", member.next_step)),
              turn);
  } else {
    ++present_;
  }
  member = {turn->NextGeneration(), true, false, false, member.next_step};
  JoinCall{turn->ticket, std::move(done)}.Answer(Membership{member.generation, {}}, &turn->answers);
}

void ProgressGroup::AllGather(ExchangeCall, GatherCall::Callback done, Turn* turn) {
  GatherCall{turn->ticket, std::move(done)}.Answer(
      Error(absl::StatusCode::kFailedPrecondition,
            absl::StrCat("it is ", v1::Consistency_Name(options_.consistency()),
                         "; AllGather is for SYNC groups")),
      &turn->answers);
}

absl::Status ProgressGroup::Check(const AdvanceCall& call) const {
  const Rank& member = ranks_[call.rank];
  if (!member.present || member.generation != call.generation) return OverError(call.generation);
  if (member.advanced && call.next_step < member.next_step) {
    return Error(absl::StatusCode::kInvalidArgument,
                 absl::StrCat("next_step is ", call.next_step, "; rank ", call.rank, " was at ",
                              member.next_step, " before"));
  }
  const auto calls =
      std::count_if(waiting_.begin(), waiting_.end(),
                    [&call](const Waiting& waiting) { return waiting.rank == call.rank; });
  if (calls >= kMaxWaitingPerRank) {
    return Error(
        absl::StatusCode::kResourceExhausted,
        absl::StrCat(calls, " calls of rank ", call.rank, " wait for other ranks already; at most ",
                     kMaxWaitingPerRank, " may"));
  }
  return absl::OkStatus();
}

void ProgressGroup::Advance(const AdvanceCall& call, StatusCall::Callback done, Turn* turn) {
  Waiting waiting{
      {turn->ticket, std::move(done)}, call.rank, call.wait_for, turn->now + step_timeout()};
  if (absl::Status status = Check(call); !status.ok()) {
    waiting.Answer(status, &turn->answers);
    return;
  }
  Rank& member = ranks_[call.rank];
  member.next_step = call.next_step;
  member.advanced = true;
  waiting_.push_back(std::move(waiting));
  AnswerReady(turn);
}

void ProgressGroup::Leave(uint64_t generation, int rank, absl::string_view, bool finished,
                          Turn* turn) {
  Rank& member = ranks_[rank];
  if (!member.present || member.generation != generation) return;
  AnswerAll(rank,
            Error(absl::StatusCode::kAborted,
                  absl::StrCat("rank ", rank, " left in step ", member.next_step)),
            turn);
  member.present = false;
  member.finished = finished;
  --present_;
  AnswerReady(turn);
}

void ProgressGroup::Watch(uint64_t, StatusCall::Callback done, Turn* turn) {
  StatusCall{turn->ticket, std::move(done)}.Answer(
      Error(absl::StatusCode::kFailedPrecondition,
            absl::StrCat("it is ", v1::Consistency_Name(options_.consistency()),
                         "; Watch is for SYNC groups")),
      &turn->answers);
}

void ProgressGroup::Withdraw(Ticket ticket, const absl::Status& status, Turn* turn) {
  WithdrawFrom(&waiting_, ticket, status, turn);
}

void ProgressGroup::Expire(Turn* turn) {
  for (auto waiting = waiting_.begin(); waiting != waiting_.end();) {
    if (waiting->deadline > turn->now) {
      ++waiting;
      continue;
    }
    std::vector<std::string> behind;
    for (const int rank : Behind(waiting->wait_for)) {
      behind.push_back(absl::StrCat("rank ", rank, " is in step ", ranks_[rank].next_step,
                                    ranks_[rank].present ? "" : " and not here"));
    }
    waiting->Answer(
        Error(absl::StatusCode::kDeadlineExceeded,
              absl::StrCat("rank ", waiting->rank, " waited ", options_.step_timeout_ms(),
                           " ms for all ranks to come to step ", waiting->wait_for, "; ",
                           absl::StrJoin(behind, ", "))),
        &turn->answers);
    waiting = waiting_.erase(waiting);
  }
}

void ProgressGroup::Close(const absl::Status& status, Turn* turn) {
  for (Waiting& waiting : waiting_) waiting.Answer(status, &turn->answers);
  waiting_.clear();
}

GroupLoad ProgressGroup::load() const {
  GroupLoad load;
  load.waiting = waiting_.size();
  return load;
}

absl::Time ProgressGroup::deadline() const {
  absl::Time first = absl::InfiniteFuture();
  for (const Waiting& waiting : waiting_) first = std::min(first, waiting.deadline);
  return first;
}

std::vector<int> ProgressGroup::Behind(int64_t wait_for) const {
  std::vector<int> behind;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].finished && ranks_[rank].next_step < wait_for)
      behind.push_back(static_cast<int>(rank));
  }
  return behind;
}

void ProgressGroup::AnswerAll(int rank, const absl::Status& status, Turn* turn) {
  for (auto waiting = waiting_.begin(); waiting != waiting_.end();) {
    if (waiting->rank == rank) {
      waiting->Answer(status, &turn->answers);
      waiting = waiting_.erase(waiting);
    } else {
      ++waiting;
    }
  }
}

void ProgressGroup::AnswerReady(Turn* turn) {
  int64_t slowest = std::numeric_limits<int64_t>::max();
  for (const Rank& rank : ranks_) {
    if (!rank.finished) slowest = std::min(slowest, rank.next_step);
  }
  for (auto waiting = waiting_.begin(); waiting != waiting_.end();) {
    if (waiting->wait_for <= slowest) {
      waiting->Answer(absl::OkStatus(), &turn->answers);
      waiting = waiting_.erase(waiting);
    } else {
      ++waiting;
    }
  }
}

}  // namespace emberd::server
