// An ASYNC or BOUNDED group: every rank comes, works and goes by itself. The group knows how far
// each one is, and holds back those that would run too far ahead.
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/group/group.h"

namespace emberd::group {
namespace {

namespace pb = internal::v1;

class ProgressGroup final : public Group {
 public:
  ProgressGroup(const GroupId& id, const v1::GroupOptions& options, absl::Time now)
      : Group(id, options, now), ranks_(options.size()) {
    for (Rank& rank : ranks_) rank.next_step = options.first_step();
  }

  void Join(const pb::JoinRequest& request, JoinDone done, Event* event) override {
    const int rank = request.rank();
    Rank& member = ranks_[rank];
    if (member.present) {
      AnswerRank(rank,
                 Error(absl::StatusCode::kAborted,
                       absl::StrCat("rank ", rank, " joined again in step ", member.next_step)),
                 event);
    } else {
      ++present_;
    }
    member = {event->NextGeneration(), true, false, false, member.next_step};
    pb::JoinResponse membership;
    membership.set_generation(member.generation);
    Answer(std::move(done), membership, &event->answers);
  }

  void Leave(const pb::LeaveRequest& request, Event* event) override {
    Rank& member = ranks_[request.rank()];
    if (member.generation != request.generation()) return;
    if (member.present) return GoAway(request.rank(), request.finished(), event);
    member.finished |= request.finished();
    AnswerReady(event);
  }

  void Watch(uint64_t generation, int rank, StatusDone done, Event* event) override {
    const absl::Status status = Check(generation, rank, ranks_[rank].next_step);
    if (!status.ok()) return Answer(std::move(done), status, &event->answers);
    waiting_.push_back({{event->ticket, std::move(done)}, rank, kNoStep, absl::InfiniteFuture()});
  }

  void Advance(const pb::AdvanceRequest& request, StatusDone done, Event* event) override {
    const int rank = request.rank();
    const absl::Status status = Check(request.generation(), rank, request.next_step());
    if (!status.ok()) return Answer(std::move(done), status, &event->answers);
    Learn(request);
    ranks_[rank].next_step = request.next_step();
    ranks_[rank].advanced = true;
    waiting_.push_back(
        {{event->ticket, std::move(done)}, rank, request.wait_for(), event->now + step_timeout()});
    AnswerReady(event);
  }

  void Withdraw(Ticket ticket, const absl::Status& status, Event* event) override {
    for (const WaitingRank& call : waiting_) {
      if (call.ticket != ticket) continue;
      const int rank = call.rank;
      const bool watch = call.wait_for == kNoStep;
      WithdrawFrom(&waiting_, ticket, status, &event->answers);
      if (watch) GoAway(rank, /*finished=*/false, event);
      return;
    }
  }

  void Expire(Event* event) override {
    const auto status_of = [&](const WaitingRank& call) -> std::optional<absl::Status> {
      if (call.deadline > event->now) return std::nullopt;
      std::vector<std::string> behind;
      for (const int rank : Behind(call.wait_for)) {
        behind.push_back(absl::StrCat("rank ", rank, " is in step ", ranks_[rank].next_step,
                                      ranks_[rank].present ? "" : " and not here"));
      }
      return Error(absl::StatusCode::kDeadlineExceeded,
                   absl::StrCat("rank ", call.rank, " waited ", options_.step_timeout_ms(),
                                " ms for all ranks to come to step ", call.wait_for, "; ",
                                absl::StrJoin(behind, ", ")));
    };
    AnswerWhere(status_of, event);
  }

  void Close(const absl::Status& status, Event* event) override {
    AnswerWhere([&](const WaitingRank&) { return std::optional(status); }, event);
  }

  bool vacant() const override { return present_ == 0; }

  GroupLoad load() const override {
    GroupLoad load;
    load.waiting = waiting_.size();
    return load;
  }

  absl::Time deadline() const override {
    absl::Time first = absl::InfiniteFuture();
    for (const WaitingRank& waiting : waiting_) first = std::min(first, waiting.deadline);
    return first;
  }

 private:
  static constexpr int kMaxWaitingPerRank = 5;
  static constexpr int64_t kNoStep = std::numeric_limits<int64_t>::max();  // a watch waits for it

  struct Rank {
    uint64_t generation = 0;  // 0: it has never been here
    bool present = false;
    bool advanced = false;  // in this generation
    bool finished = false;
    int64_t next_step = 0;
  };
  struct WaitingRank : Waiting<StatusDone> {
    int rank = 0;
    int64_t wait_for = 0;
    absl::Time deadline;
  };

  // Takes over what shards know of ranks that are not here: they may have heard more.
  void Learn(const pb::AdvanceRequest& request) {
    for (const pb::RankProgress& known : request.ranks()) {
      if (known.rank() < 0 || known.rank() >= size()) continue;
      Rank& rank = ranks_[known.rank()];
      if (rank.present) continue;  // it says so itself
      // What was read before the rank came back and left once more.
      const bool outdated = rank.generation != 0 && known.next_step() < rank.next_step;
      rank.next_step = std::max(rank.next_step, known.next_step());
      rank.finished |= known.finished() && !outdated;
    }
  }

  // OK: a call of this member may tell this progress.
  absl::Status Check(uint64_t generation, int rank, int64_t next_step) const {
    const Rank& member = ranks_[rank];
    if (!member.present || member.generation != generation) return OverError(generation);
    if (member.advanced && next_step < member.next_step) {
      return Error(absl::StatusCode::kInvalidArgument,
                   absl::StrCat("next_step is ", next_step, "; rank ", rank, " was at step ",
                                member.next_step, " before"));
    }
    const auto calls =
        std::count_if(waiting_.begin(), waiting_.end(),
                      [rank](const WaitingRank& waiting) { return waiting.rank == rank; });
    if (calls >= kMaxWaitingPerRank) {
      return Error(
          absl::StatusCode::kResourceExhausted,
          absl::StrCat(calls, " calls of rank ", rank, " wait for other ranks already; at most ",
                       kMaxWaitingPerRank, " are allowed"));
    }
    return absl::OkStatus();
  }

  // Of a rank that is present.
  void GoAway(int rank, bool finished, Event* event) {
    Rank& member = ranks_[rank];
    AnswerRank(rank,
               Error(absl::StatusCode::kAborted,
                     absl::StrCat("rank ", rank, " left in step ", member.next_step)),
               event);
    member.present = false;
    member.finished = finished;
    --present_;
    AnswerReady(event);
  }

  // Ranks that are not yet at this step.
  std::vector<int> Behind(int64_t step) const {
    std::vector<int> behind;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (!ranks_[rank].finished && ranks_[rank].next_step < step)
        behind.push_back(static_cast<int>(rank));
    }
    return behind;
  }

  // Answers the waiting calls for which `status_of(call)` gives a status.
  template <typename StatusOf>
  void AnswerWhere(const StatusOf& status_of, Event* event) {
    std::erase_if(waiting_, [&](const WaitingRank& call) {
      const std::optional<absl::Status> status = status_of(call);
      if (status.has_value()) Answer(call.done, *status, &event->answers);
      return status.has_value();
    });
  }

  void AnswerRank(int rank, const absl::Status& status, Event* event) {
    const auto status_of = [&](const WaitingRank& call) {
      return call.rank == rank ? std::optional(status) : std::nullopt;
    };
    AnswerWhere(status_of, event);
  }

  void AnswerReady(Event* event) {
    int64_t slowest = std::numeric_limits<int64_t>::max();
    for (const Rank& rank : ranks_) {
      if (!rank.finished) slowest = std::min(slowest, rank.next_step);
    }
    const auto status_of = [&](const WaitingRank& call) {
      return call.wait_for <= slowest ? std::optional(absl::OkStatus()) : std::nullopt;
    };
    AnswerWhere(status_of, event);
  }

  std::vector<Rank> ranks_;
  int present_ = 0;
  std::vector<WaitingRank> waiting_;
};

}  // namespace

std::unique_ptr<Group> MakeProgressGroup(const GroupId& id, const v1::GroupOptions& options,
                                         absl::Time now) {
  return std::make_unique<ProgressGroup>(id, options, now);
}

}  // namespace emberd::group
