#include "server/group/collective_router.h"

#include <algorithm>
#include <utility>

#include "server/group/host_choice.h"
#include "server/group/local_collective.h"

namespace emberd::server {

CollectiveRouter::CollectiveRouter(std::vector<Collective*> hosts)
    : hosts_(std::move(hosts)), local_collective_(MakeLocalCollective(&local_)) {}

Collective& CollectiveRouter::HostFor(const GroupId& id) const {
  return *hosts_[HostOf(id, static_cast<int>(hosts_.size()))];
}

absl::StatusOr<Membership> CollectiveRouter::Join(const GroupId& id, int rank,
                                                  const v1::GroupOptions& options,
                                                  const std::string& coordinator,
                                                  rpc::CallContext* context) {
  absl::StatusOr<Membership> membership = HostFor(id).Join(id, rank, options, coordinator, context);
  if (!membership.ok()) return membership;
  const std::vector<std::string>& coordinators = membership->coordinators;
  const bool all_here =
      !coordinators.empty() && std::all_of(coordinators.begin(), coordinators.end(),
                                           [&](const auto& other) { return other == coordinator; });
  if (all_here) ExchangeHere(id, membership->generation, options);
  return membership;
}

void CollectiveRouter::ExchangeHere(const GroupId& id, uint64_t generation,
                                    const v1::GroupOptions& options) {
  absl::MutexLock lock(&mutex_);
  std::erase_if(watched_, [](const auto& entry) { return entry.second.over->load(); });
  const auto before = watched_.find(id);
  // Another rank's join was answered first.
  if (before != watched_.end() && before->second.generation >= generation) return;
  // Without room the host exchanges the values.
  if (!local_.Adopt(id, generation, options)) return;
  auto over = std::make_shared<std::atomic<bool>>(false);
  // Runs under no lock but the watch's own, so that a watch may be dropped under mutex_.
  auto ended = [this, id, generation, over](const absl::Status& status) {
    local_.End(id, generation, status);
    over->store(true);
  };
  watched_[id] = {generation, over, HostFor(id).Watch(id, generation, std::move(ended))};
}

absl::StatusOr<Gathered> CollectiveRouter::AllGather(const GroupId& id, uint64_t generation,
                                                     int rank, int group_key, int64_t instance_key,
                                                     std::string value, rpc::CallContext* context) {
  Collective& collective = local_.Knows(id, generation) ? *local_collective_ : HostFor(id);
  return collective.AllGather(id, generation, rank, group_key, instance_key, std::move(value),
                              context);
}

absl::Status CollectiveRouter::Advance(const GroupId& id, uint64_t generation, int rank,
                                       int64_t next_step, int64_t wait_for,
                                       rpc::CallContext* context) {
  return HostFor(id).Advance(id, generation, rank, next_step, wait_for, context);
}

void CollectiveRouter::Leave(const GroupId& id, uint64_t generation, int rank,
                             const std::string& reason, bool finished) {
  local_.Leave(id, generation, rank, reason, finished).IgnoreError();
  HostFor(id).Leave(id, generation, rank, reason, finished);
}

std::unique_ptr<GenerationWatch> CollectiveRouter::Watch(const GroupId& id, uint64_t generation,
                                                         std::function<void(absl::Status)> ended) {
  return HostFor(id).Watch(id, generation, std::move(ended));
}

}  // namespace emberd::server
