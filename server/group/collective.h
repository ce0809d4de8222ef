// Where the ranks of a training group meet. What each call means and its errors:
// emberd/internal/v1/collective_service.proto.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/v1/train.pb.h"
#include "server/rpc/call_context.h"

namespace emberd::server {

struct GroupId {
  uint64_t model_id = 0;
  std::string group;

  auto operator<=>(const GroupId&) const = default;
};

struct JoinCall {
  int rank = 0;
  v1::GroupOptions options;  // complete
  std::string coordinator;   // who serves the member: one string per life of a coordinator process
};
struct Membership {
  uint64_t generation = 0;                // of the host's own counting; shards have another
  std::vector<std::string> coordinators;  // SYNC: by rank; otherwise empty
};

struct ExchangeKey {
  int64_t instance_key = 0;  // the step
  int group_key = 0;         // which exchange of the step

  auto operator<=>(const ExchangeKey&) const = default;
};
struct ExchangeCall {
  uint64_t generation = 0;
  int rank = 0;
  ExchangeKey key;
  std::string value;
};
struct Gathered {
  std::vector<std::string> values;  // by rank
  std::vector<int64_t> arrival_us;  // by rank: microseconds after the first rank

  bool operator==(const Gathered&) const = default;
};

struct RankProgress {
  int rank = 0;
  int64_t next_step = 0;
  bool finished = false;  // it has done all its steps
};
struct AdvanceCall {
  uint64_t generation = 0;
  int rank = 0;
  int64_t next_step = 0;
  int64_t wait_for = 0;
  std::vector<RankProgress> ranks = {};  // what shards know of them
};

struct LeaveCall {
  uint64_t generation = 0;
  int rank = 0;
  std::string reason;
  bool finished = false;
};

// One host of groups: in this process (rendezvous.h) or behind gRPC (collective_rpc.h).
// Thread-safe. Nothing blocks: every call runs its callback exactly once, now or later, on any
// thread; callbacks must be short.
class Collective {
 public:
  using JoinDone = std::function<void(absl::StatusOr<Membership>)>;
  using GatherDone = std::function<void(absl::StatusOr<Gathered>)>;
  using StatusDone = std::function<void(absl::Status)>;
  // Answers the call that returned it with this status, which is not OK, if it still waits. The
  // call is then as if it had never come; but a value that it brought to an exchange stays there.
  using Withdraw = std::function<void(const absl::Status&)>;

  virtual ~Collective() = default;

  // `context` gives deadline and trace to a call that leaves the process, and may go when the
  // function has returned. Null: neither.
  virtual Withdraw Join(const GroupId& id, JoinCall call, const rpc::CallContext* context,
                        JoinDone done) = 0;
  virtual Withdraw AllGather(const GroupId& id, ExchangeCall call, const rpc::CallContext* context,
                             GatherDone done) = 0;
  virtual Withdraw Advance(const GroupId& id, const AdvanceCall& call,
                           const rpc::CallContext* context, StatusDone done) = 0;
  virtual Withdraw Leave(const GroupId& id, const LeaveCall& call, const rpc::CallContext* context,
                         StatusDone done) = 0;
  // Waits for the end of the generation, and tells why it ended; never OK. Each coordinator of its
  // members does, for one of them: where it withdraws the call, they are gone.
  virtual Withdraw Watch(const GroupId& id, uint64_t generation, int rank, StatusDone done) = 0;
};

}  // namespace emberd::server
