// A SYNC group: all ranks join, and are then members of one generation until one of them leaves,
// joins again or misses a deadline.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/group/group.h"

namespace emberd::server {

class SyncGroup final : public Group {
 public:
  using Group::Group;

  // Makes `generation` the live one, without joins: another host has started it. Nothing happens
  // if it, or a later one, has been here.
  void Adopt(uint64_t generation, Turn* turn);
  // Ends this generation, if it lives.
  void End(uint64_t generation, const absl::Status& status, Turn* turn);
  // It lives here, or was the last to live here.
  bool Knows(uint64_t generation) const;

  void Join(int rank, const std::string& coordinator, JoinCall::Callback done, Turn* turn) override;
  void AllGather(ExchangeCall call, GatherCall::Callback done, Turn* turn) override;
  void Advance(const AdvanceCall& call, StatusCall::Callback done, Turn* turn) override;
  void Leave(uint64_t generation, int rank, absl::string_view reason, bool finished,
             Turn* turn) override;
  void Watch(uint64_t generation, StatusCall::Callback done, Turn* turn) override;
  void Withdraw(Ticket ticket, const absl::Status& status, Turn* turn) override;
  void Expire(Turn* turn) override;
  void Close(const absl::Status& status, Turn* turn) override;
  bool vacant() const override { return joining_.empty() && !live(); }
  GroupLoad load() const override;
  absl::Time deadline() const override;

 private:
  struct Joining {
    JoinCall call;
    std::string coordinator;
    absl::Time deadline;
  };
  struct Generation {
    Generation(uint64_t number, std::string owner, int size, absl::Duration timeout)
        : number(number), exchanges(std::move(owner), size, timeout) {}

    const uint64_t number;
    absl::Status end;  // OK: it lives
    ExchangeTable exchanges;
    std::optional<int64_t> step;  // the highest that a member has come to
    std::vector<StatusCall> watches;
  };

  void Begin(uint64_t generation);
  bool live() const { return generation_.has_value() && generation_->end.ok(); }
  // " in step 17", for errors; empty before the first exchange.
  std::string InStep() const;
  void EndLive(const absl::Status& status, Turn* turn);
  void ExpireJoins(Turn* turn);

  std::map<int, Joining> joining_;        // by rank
  std::optional<Generation> generation_;  // the newest; nothing is live while somebody joins
};

}  // namespace emberd::server
