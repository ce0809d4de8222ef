// A shard in the coordinator's own process: calls go straight to a ShardHost, with no copy and no
// network.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "emberd/v1/cluster.pb.h"
#include "server/ops/metrics.h"
#include "server/shard/shard_backend.h"

namespace emberd::server {

// `cluster` is complete (config::CompleteCluster). `metrics` must outlive the shard.
absl::StatusOr<std::shared_ptr<ShardBackend>> MakeLocalShard(const v1::ClusterConfig& cluster,
                                                             int shard_index,
                                                             ops::Metrics* metrics);

}  // namespace emberd::server
