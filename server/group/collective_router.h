// A coordinator's way to its groups: every call goes to the shard that hosts the group. When all
// ranks of a SYNC group are served by this coordinator, it exchanges their values itself, without a
// call; the host still sees joins and leaves, and its word that a generation is over counts here.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/group/collective.h"
#include "server/group/rendezvous.h"

namespace emberd::server {

class CollectiveRouter final : public Collective {
 public:
  // `hosts[i]`: of shard i. They must outlive the router.
  explicit CollectiveRouter(std::vector<Collective*> hosts);

  absl::StatusOr<Membership> Join(const GroupId& id, int rank, const v1::GroupOptions& options,
                                  const std::string& coordinator,
                                  rpc::CallContext* context) override;
  absl::StatusOr<Gathered> AllGather(const GroupId& id, uint64_t generation, int rank,
                                     int group_key, int64_t instance_key, std::string value,
                                     rpc::CallContext* context) override;
  absl::Status Advance(const GroupId& id, uint64_t generation, int rank, int64_t next_step,
                       int64_t wait_for, rpc::CallContext* context) override;
  void Leave(const GroupId& id, uint64_t generation, int rank, const std::string& reason,
             bool finished) override;
  std::unique_ptr<GenerationWatch> Watch(const GroupId& id, uint64_t generation,
                                         std::function<void(absl::Status)> ended) override;

  // What the groups that have all their ranks here hold.
  Rendezvous::Load local_load() const { return local_.load(); }

 private:
  struct Watched {
    uint64_t generation = 0;
    std::shared_ptr<std::atomic<bool>> over;
    std::unique_ptr<GenerationWatch> watch;
  };

  Collective& HostFor(const GroupId& id) const;
  void ExchangeHere(const GroupId& id, uint64_t generation, const v1::GroupOptions& options);

  const std::vector<Collective*> hosts_;
  Rendezvous local_;
  const std::unique_ptr<Collective> local_collective_;
  absl::Mutex mutex_;
  // Of the groups whose values are exchanged here. Last: their callbacks use local_.
  std::map<GroupId, Watched> watched_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::server
