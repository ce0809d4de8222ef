// A coordinator's way to its groups: calls that block, each to the shard that hosts the group. When
// all ranks of a SYNC group are served by this coordinator, it exchanges their values itself,
// without a call; the host still sees joins and leaves, and what it says of a generation's end
// counts here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/thread_pools.h"
#include "server/group/rendezvous.h"
#include "server/host/shard_backend.h"
#include "server/host/verbs.h"
#include "server/rpc/call_context.h"

namespace emberd::host {

// Thread-safe. Calls return when the answer is there, when the context's deadline has passed
// (DEADLINE_EXCEEDED) or when it is cancelled (CANCELLED), whatever comes first.
class CollectiveRouter {
 public:
  // `threads` must outlive the router; each generation with members here has one.
  CollectiveRouter(std::vector<std::shared_ptr<ShardBackend>> shards, BlockingPool* threads);
  ~CollectiveRouter();

  absl::StatusOr<internal::v1::JoinResponse> Join(const internal::v1::JoinRequest& request,
                                                  rpc::CallContext* context);
  absl::StatusOr<internal::v1::AllGatherResponse> AllGather(
      const internal::v1::AllGatherRequest& request, rpc::CallContext* context);
  absl::Status Advance(const internal::v1::AdvanceRequest& request, rpc::CallContext* context);
  // Of the call that lasts as long as the host has the generation that was joined here; cancelled
  // once it does not, or may not, as after a restart. For ranks that need no others; those of a
  // SYNC group hear it in their exchanges, with the reason.
  std::shared_ptr<const rpc::CallContext> WatchOf(const internal::v1::GroupName& name,
                                                  uint64_t generation);
  // Under a short deadline of its own. `finished`: tells all shards, too, that the rank has done
  // all its steps. A shard that cannot be reached is told again by Retry, which is to be called
  // every second, until it hears. Retry takes a second at most, and a thread for each such shard.
  void Leave(const internal::v1::LeaveRequest& request,
             std::optional<internal::v1::OpenGroupRequest> finished = std::nullopt);
  void Retry();

  // What the groups that have all their ranks here hold.
  group::Rendezvous::Load local_load() const { return local_.load(); }

 private:
  using Generation = std::pair<group::GroupId, uint64_t>;
  struct Leaving {
    internal::v1::LeaveRequest request;
    std::optional<internal::v1::OpenGroupRequest> finished;
    bool logged = false;
  };
  using ByShard = std::map<size_t, std::vector<Leaving>>;

  ShardBackend& HostOf(const internal::v1::GroupName& name) const;
  // Sees a generation end at its host, and ends it here. The host sees that its members are there.
  void Watch(const internal::v1::WatchRequest& request, rpc::CallContext* context);
  // What the shard does not hear goes to unheard_.
  void Tell(size_t shard, Leaving leaving, rpc::CallContext* context);

  const std::vector<std::shared_ptr<ShardBackend>> shards_;
  BlockingPool* const threads_;
  group::Rendezvous local_;
  ShardVerbs local_verbs_{/*host=*/nullptr, &local_};
  absl::Mutex mutex_;
  absl::CondVar watch_over_;
  // Watches under way: of the generations with members here.
  std::map<Generation, std::shared_ptr<rpc::CallContext>> watches_ ABSL_GUARDED_BY(mutex_);
  ByShard unheard_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::host
