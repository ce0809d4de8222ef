// Where the ranks of a training group meet. What each call means, its fields and its errors:
// emberd/internal/v1/collective_service.proto.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/internal/v1/collective_service.pb.h"
#include "server/rpc/call_context.h"

namespace emberd::group {

struct GroupId {
  uint64_t model_id = 0;
  std::string group;

  auto operator<=>(const GroupId&) const = default;
};

inline GroupId IdOf(const internal::v1::GroupName& name) { return {name.model_id(), name.group()}; }

// One host of groups: in this process (rendezvous.h) or behind gRPC (collective_rpc.h).
// Thread-safe. Nothing blocks: every call runs its callback exactly once, now or later, on any
// thread; callbacks must be short.
class Collective {
 public:
  using JoinDone = std::function<void(absl::StatusOr<internal::v1::JoinResponse>)>;
  using GatherDone = std::function<void(absl::StatusOr<internal::v1::AllGatherResponse>)>;
  using StatusDone = std::function<void(absl::Status)>;
  // Answers the call that returned it with this status, which is not OK, if it still waits. The
  // call is then as if it had never come; but a value that it brought to an exchange stays there.
  using Withdraw = std::function<void(const absl::Status&)>;

  // Of a call: what it asks, and what its callback gets.
  template <typename Request, typename Result>
  using Method = Withdraw (Collective::*)(Request, const rpc::CallContext*,
                                          std::function<void(Result)>);

  virtual ~Collective() = default;

  // `context` gives deadline and trace to a call that leaves the process, and may go when the
  // function has returned. Null: neither.
  virtual Withdraw Join(internal::v1::JoinRequest request, const rpc::CallContext* context,
                        JoinDone done) = 0;
  virtual Withdraw AllGather(internal::v1::AllGatherRequest request,
                             const rpc::CallContext* context, GatherDone done) = 0;
  virtual Withdraw Advance(internal::v1::AdvanceRequest request, const rpc::CallContext* context,
                           StatusDone done) = 0;
  virtual Withdraw Leave(internal::v1::LeaveRequest request, const rpc::CallContext* context,
                         StatusDone done) = 0;
  // Never answered with OK.
  virtual Withdraw Watch(internal::v1::WatchRequest request, const rpc::CallContext* context,
                         StatusDone done) = 0;
};

}  // namespace emberd::group
