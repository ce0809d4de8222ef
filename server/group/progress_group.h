// An ASYNC or BOUNDED group: every rank comes, works and goes by itself. The group knows how far
// each one is, and holds back those that would run too far ahead.
#pragma once

#include <string>
#include <vector>

#include "server/group/group.h"

namespace emberd::server {

class ProgressGroup final : public Group {
 public:
  ProgressGroup(const GroupId& id, const v1::GroupOptions& options, absl::Time now);

  void Join(int rank, const std::string& coordinator, JoinCall::Callback done, Turn* turn) override;
  void AllGather(ExchangeCall call, GatherCall::Callback done, Turn* turn) override;
  void Advance(const AdvanceCall& call, StatusCall::Callback done, Turn* turn) override;
  void Leave(uint64_t generation, int rank, absl::string_view reason, bool finished,
             Turn* turn) override;
  void Watch(uint64_t generation, StatusCall::Callback done, Turn* turn) override;
  void Withdraw(Ticket ticket, const absl::Status& status, Turn* turn) override;
  void Expire(Turn* turn) override;
  void Close(const absl::Status& status, Turn* turn) override;
  bool vacant() const override { return present_ == 0; }
  GroupLoad load() const override;
  absl::Time deadline() const override;

 private:
  static constexpr int kMaxWaitingPerRank = 4;

  struct Rank {
    uint64_t generation = 0;
    bool present = false;
    bool advanced = false;  // in this generation
    bool finished = false;
    int64_t next_step = 0;
  };
  struct Waiting : StatusCall {
    int rank = 0;
    int64_t wait_for = 0;
    absl::Time deadline;
  };

  // OK: the call may tell this progress.
  absl::Status Check(const AdvanceCall& call) const;
  // Ranks that hold back who waits for this step.
  std::vector<int> Behind(int64_t wait_for) const;
  void AnswerAll(int rank, const absl::Status& status, Turn* turn);
  void AnswerReady(Turn* turn);

  std::vector<Rank> ranks_;
  int present_ = 0;
  std::vector<Waiting> waiting_;
};

}  // namespace emberd::server
