// One training group: what its requests may hold, wherever they enter (at a coordinator, at the
// group's host, at a shard), and at its host, who has joined and what its members wait for.
//
// Pure state, without locks, clock or threads: a Rendezvous brings them. Two kinds: the members of
// a SYNC group share a generation (sync_group.cc); those of an ASYNC or BOUNDED group have one each
// (progress_group.cc).
// See docs/groups.md.
#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "emberd/internal/v1/groups.pb.h"
#include "emberd/v1/train.pb.h"

namespace emberd::group {

inline constexpr int kMaxGroupSize = 1024;
inline constexpr size_t kMaxGroupNameBytes = 128;
inline constexpr int64_t kMaxFirstStep = int64_t{1} << 62;
// So that the step after it has a number, too.
inline constexpr int64_t kMaxStep = std::numeric_limits<int64_t>::max() - 1;

// Of the exchanges of a SYNC group.
inline constexpr int kGroupKeys = 16;            // group_key is in 0 .. 15
inline constexpr size_t kMaxOpenExchanges = 64;  // that wait for ranks
inline constexpr size_t kMaxKeptExchanges = 16;  // complete ones that answer repeated requests
inline constexpr int64_t kMaxKeptBytes = int64_t{1} << 20;  // of these; the newest always stays
inline constexpr size_t kMaxValueBytes = size_t{64} << 10;
inline constexpr int kMaxCallsPerRank = 4;  // of one rank in one exchange

// Errors of what follows: INVALID_ARGUMENT with the field, its value and the range; which request
// or group it was, the caller adds.
absl::Status CheckInRange(absl::string_view field, int64_t value, int64_t least, int64_t most);

// 1 to 128 letters, digits and _-.:/
absl::Status CheckGroupName(absl::string_view field, absl::string_view name);
// Of options whose defaults have been filled in.
absl::Status CheckGroupOptions(const v1::GroupOptions& options);
// A member's options against those that the other members joined with.
absl::Status CheckSameOptions(const v1::GroupOptions& given, const v1::GroupOptions& others);
absl::Status CheckRank(int rank, int size);
absl::Status CheckExchange(const internal::v1::AllGatherRequest& request);
absl::Status CheckAdvance(const internal::v1::AdvanceRequest& request);

struct GroupId {
  uint64_t model_id = 0;
  std::string group;

  auto operator<=>(const GroupId&) const = default;
};

inline GroupId IdOf(const internal::v1::GroupName& name) { return {name.model_id(), name.group()}; }

// Which of `shards` hosts a group: the same on every coordinator, in every process and release. The
// first 64 bits of the SHA-256 of the model id (8 bytes, little-endian) and the name, big-endian,
// modulo `shards`.
int HostOf(const GroupId& id, int shards);

using JoinDone = std::function<void(absl::StatusOr<internal::v1::JoinResponse>)>;
using GatherDone = std::function<void(absl::StatusOr<internal::v1::AllGatherResponse>)>;
using StatusDone = std::function<void(absl::Status)>;

// A host counts the generations of its groups one by one, from a random number when it starts
// (RendezvousOptions). So the numbers of one life of a host are near each other, those of two are
// far apart, and what comes late from a former life is known by its number.
//
// Whether `generation` is `newest` or came before it at the same host.
inline bool HasBeen(uint64_t generation, uint64_t newest) {
  return newest - generation < uint64_t{1} << 32;
}

using Answers = std::vector<std::function<void()>>;
using Ticket = uint64_t;  // names a call that waits

// Something that happens at a host: a call, or that time passes. Brings the time, and collects the
// answers that it causes; they are given when all locks are let go.
struct Event {
  // One more than the last of the host.
  uint64_t NextGeneration() { return ++*last_generation; }

  absl::Time now;
  Ticket ticket = 0;  // of the call, should it have to wait
  uint64_t* last_generation = nullptr;
  Answers answers;
};

// `done` gets `result` when the event's answers are given.
template <typename Done, typename Result>
void Answer(Done done, Result result, Answers* answers) {
  answers->push_back([done = std::move(done), result = std::move(result)] { done(result); });
}

// A call that waits for something.
template <typename Done>
struct Waiting {
  Ticket ticket = 0;
  Done done;
};

// Takes the call of this ticket out of `calls` and answers it. False: it is not there.
template <typename Call, typename Result>
bool WithdrawFrom(std::vector<Call>* calls, Ticket ticket, const Result& result, Answers* answers) {
  const auto call = std::find_if(calls->begin(), calls->end(), [ticket](const Call& candidate) {
    return candidate.ticket == ticket;
  });
  if (call == calls->end()) return false;
  Answer(std::move(call->done), result, answers);
  calls->erase(call);
  return true;
}

// Counts of what a group holds.
struct GroupLoad {
  size_t joining = 0;  // calls of Join that wait
  size_t waiting = 0;  // other calls that wait
  size_t open_exchanges = 0;
  size_t kept_exchanges = 0;
  int64_t value_bytes = 0;
};

// Calls have been checked (see above). Every callback is put into event->answers once, now or
// at a later event; until then the call is known by event->ticket.
class Group {
 public:
  // Step timeouts without a call, after which a group may be forgotten.
  static constexpr int kIdleTimeouts = 10;

  virtual ~Group() = default;

  virtual void Join(const internal::v1::JoinRequest& request, JoinDone done, Event* event) = 0;
  virtual void Leave(const internal::v1::LeaveRequest& request, Event* event) = 0;
  virtual void Watch(uint64_t generation, int rank, StatusDone done, Event* event) = 0;
  // What only one kind of group has is refused by the other, with FAILED_PRECONDITION.
  virtual void AllGather(internal::v1::AllGatherRequest request, GatherDone done, Event* event);
  virtual void Advance(const internal::v1::AdvanceRequest& request, StatusDone done, Event* event);

  // For members that are all served by this process: makes `generation` of a SYNC group the live
  // one, without joins, since another host has started it. Nothing happens if it, or a later one,
  // has been here.
  virtual void Adopt(uint64_t, Event*) {}
  // Ends this generation of a SYNC group, if it lives here.
  virtual void End(uint64_t, const absl::Status&, Event*) {}
  // The generation of a SYNC group lives here, or was the last to live here.
  virtual bool Knows(uint64_t) const { return false; }

  // The call gets `status`, if it still waits.
  virtual void Withdraw(Ticket ticket, const absl::Status& status, Event* event) = 0;
  // Answers what is overdue at event->now.
  virtual void Expire(Event* event) = 0;
  // Every call that waits gets `status`.
  virtual void Close(const absl::Status& status, Event* event) = 0;

  // No member is here, and nobody waits to become one.
  virtual bool vacant() const = 0;
  virtual GroupLoad load() const = 0;
  // When something here is overdue; InfiniteFuture: nothing ever.
  virtual absl::Time deadline() const = 0;

  const v1::GroupOptions& options() const { return options_; }
  absl::Time last_call() const { return last_call_; }
  void Touch(absl::Time now) { last_call_ = now; }
  absl::Duration step_timeout() const { return absl::Milliseconds(options_.step_timeout_ms()); }
  absl::Time idle_deadline() const { return last_call_ + kIdleTimeouts * step_timeout(); }

 protected:
  Group(const GroupId& id, const v1::GroupOptions& options, absl::Time now);

  int size() const { return options_.size(); }
  std::string name() const;  // "group 'g'"
  // A status whose message begins with the name.
  absl::Status Error(absl::StatusCode code, absl::string_view text) const;
  // For a generation that is not the live one.
  absl::Status OverError(uint64_t generation) const;

  const GroupId id_;
  const v1::GroupOptions options_;

 private:
  absl::Status RefuseVerb(absl::string_view verb, absl::string_view kind) const;

  absl::Time last_call_;
};

std::unique_ptr<Group> MakeSyncGroup(const GroupId& id, const v1::GroupOptions& options,
                                     absl::Time now);
std::unique_ptr<Group> MakeProgressGroup(const GroupId& id, const v1::GroupOptions& options,
                                         absl::Time now);

// "rank 2", "ranks 0, 2 and 5-7"; ascending.
std::string RankList(const std::vector<int>& ranks);

}  // namespace emberd::group
