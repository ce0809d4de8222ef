// One training group at its host: who has joined, and what its members wait for.
//
// Pure state, without locks, clock or threads: a Rendezvous brings them. Two kinds: the members of
// a SYNC group share a generation (sync_group.h); those of an ASYNC or BOUNDED group have one each
// (progress_group.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/group/collective.h"
#include "server/group/exchange_table.h"

namespace emberd::server {

// What a call brings along and takes away: the time, and what to do when the locks are let go.
struct Turn {
  // Grows over all generations of a host, and over its restarts: microseconds since the epoch, or
  // one more than the last.
  uint64_t NextGeneration();

  absl::Time now;
  Ticket ticket = 0;  // of this call, should it have to wait
  uint64_t* last_generation = nullptr;
  Answers answers;
};

// A call that waits for something.
template <typename Result>
struct WaitingCall {
  using Callback = std::function<void(Result)>;

  void Answer(Result result, Answers* answers) {
    answers->push_back([done = std::move(done), result = std::move(result)]() mutable {
      done(std::move(result));
    });
  }

  Ticket ticket = 0;
  Callback done;
};

// Counts of what a group holds.
struct GroupLoad {
  size_t joining = 0;  // calls of Join that wait
  size_t waiting = 0;  // other calls that wait
  size_t open_exchanges = 0;
  size_t kept_exchanges = 0;
  int64_t value_bytes = 0;
};

struct ExchangeCall {
  uint64_t generation = 0;
  int rank = 0;
  ExchangeKey key;
  std::string value;
};
struct AdvanceCall {
  uint64_t generation = 0;
  int rank = 0;
  int64_t next_step = 0;
  int64_t wait_for = 0;
};

// Ranks have been checked against the size. Every callback is put into turn->answers once, now or
// in a later turn; until then the call is known by turn->ticket.
class Group {
 public:
  using JoinCall = WaitingCall<absl::StatusOr<Membership>>;
  using GatherCall = WaitingCall<absl::StatusOr<Gathered>>;
  using StatusCall = WaitingCall<absl::Status>;

  // Step timeouts without a call, after which a group may be forgotten.
  static constexpr int kIdleTimeouts = 10;

  static std::unique_ptr<Group> Create(const GroupId& id, const v1::GroupOptions& options,
                                       absl::Time now);
  Group(const GroupId& id, const v1::GroupOptions& options, absl::Time now);
  virtual ~Group() = default;

  const v1::GroupOptions& options() const { return options_; }

  virtual void Join(int rank, const std::string& coordinator, JoinCall::Callback done,
                    Turn* turn) = 0;
  virtual void AllGather(ExchangeCall call, GatherCall::Callback done, Turn* turn) = 0;
  virtual void Advance(const AdvanceCall& call, StatusCall::Callback done, Turn* turn) = 0;
  virtual void Leave(uint64_t generation, int rank, absl::string_view reason, bool finished,
                     Turn* turn) = 0;
  virtual void Watch(uint64_t generation, StatusCall::Callback done, Turn* turn) = 0;

  // The call gets `status`, if it still waits.
  virtual void Withdraw(Ticket ticket, const absl::Status& status, Turn* turn) = 0;
  // Answers what is overdue at turn->now.
  virtual void Expire(Turn* turn) = 0;
  // Every call that waits gets `status`.
  virtual void Close(const absl::Status& status, Turn* turn) = 0;

  // No member is here, and nobody waits to become one.
  virtual bool vacant() const = 0;
  virtual GroupLoad load() const = 0;
  // When something here is overdue; InfiniteFuture: nothing ever.
  virtual absl::Time deadline() const = 0;

  absl::Time last_call() const { return last_call_; }
  void Touch(absl::Time now) { last_call_ = now; }
  absl::Duration step_timeout() const { return absl::Milliseconds(options_.step_timeout_ms()); }
  absl::Time idle_deadline() const { return last_call_ + kIdleTimeouts * step_timeout(); }

  // A status whose message begins with the group's name.
  absl::Status Error(absl::StatusCode code, absl::string_view text) const;
  // For a generation that is not the live one.
  absl::Status OverError(uint64_t generation) const;

 protected:
  int size() const { return options_.size(); }
  std::string name() const;  // "group 'g'"

  const GroupId id_;
  const v1::GroupOptions options_;

 private:
  absl::Time last_call_;
};

// "rank 2", "ranks 0, 2 and 5-7"; ascending.
std::string RankList(const std::vector<int>& ranks);

// Takes the call of this ticket out of `calls` and answers it. False: it is not there.
template <typename Call, typename Result>
bool WithdrawFrom(std::vector<Call>* calls, Ticket ticket, const Result& result, Turn* turn) {
  const auto call = std::find_if(calls->begin(), calls->end(), [ticket](const Call& candidate) {
    return candidate.ticket == ticket;
  });
  if (call == calls->end()) return false;
  call->Answer(result, &turn->answers);
  calls->erase(call);
  return true;
}

}  // namespace emberd::server
