// A coordinator's way to its groups: calls that block, each to the shard that hosts the group. When
// all ranks of a SYNC group are served by this coordinator, it exchanges their values itself,
// without a call; the host still sees joins and leaves, and what it says of a generation's end
// counts here.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/group/collective.h"
#include "server/group/rendezvous.h"
#include "server/rpc/call_context.h"

namespace emberd::group {

// Which of `shards` hosts a group: the same on every coordinator, in every process and release. The
// first 64 bits of the SHA-256 of the model id (8 bytes, little-endian) and the name, big-endian,
// modulo `shards`.
int HostOf(const GroupId& id, int shards);

// Thread-safe. Calls return when the answer is there, when the context's deadline has passed
// (DEADLINE_EXCEEDED) or when it is cancelled (CANCELLED), whatever comes first.
class CollectiveRouter {
 public:
  // `hosts[i]`: of shard i. They must outlive the router.
  explicit CollectiveRouter(std::vector<Collective*> hosts);
  ~CollectiveRouter();

  absl::StatusOr<internal::v1::JoinResponse> Join(const internal::v1::JoinRequest& request,
                                                  rpc::CallContext* context);
  absl::StatusOr<internal::v1::AllGatherResponse> AllGather(internal::v1::AllGatherRequest request,
                                                            rpc::CallContext* context);
  absl::Status Advance(const internal::v1::AdvanceRequest& request, rpc::CallContext* context);
  // Best effort, under a short deadline of its own.
  void Leave(const internal::v1::LeaveRequest& request);

  // What the groups that have all their ranks here hold.
  Rendezvous::Load local_load() const { return local_.load(); }

 private:
  class Watch;

  Collective& HostFor(const GroupId& id) const;

  const std::vector<Collective*> hosts_;
  Rendezvous local_;
  absl::Mutex mutex_;
  // Of the generations with members here. Last: their callbacks use local_.
  std::map<std::pair<GroupId, uint64_t>, std::unique_ptr<Watch>> watches_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::group
