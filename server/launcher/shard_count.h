// `emberd up` with storage.durability LOG and another number of shards than the logs in
// storage.directory are of: the models move to the new number, through a checkpoint of each.
//
// While they do, the directory holds, beside logs (shard-NNNN) and checkpoints:
//
//   moving          which checkpoints hold the models. While this file is there, they count, and
//                   logs of the new shards are in the making; before it, the old logs count, after
//                   it the new ones. So it does not matter where the process is killed: the next
//                   one goes on.
//   old-shards/     the old logs, until the cluster is up with the new ones.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::launcher {

// A file in storage.directory, from the begin of a move to its end.
inline constexpr char kMoving[] = "moving";

// Moves the models, if it is needed, so that the shards of `cluster`, which is complete, can start
// from what is in its storage.directory. Ends soon, with CANCELLED, when `stopped` says so. Only
// threads of its own run meanwhile, and none when it returns. FAILED_PRECONDITION: the logs are not
// those of one cluster, or of another number of partitions.
absl::Status FitLogsToShards(const v1::ClusterConfig& cluster,
                             const std::function<bool()>& stopped);

// Whether logs of before a move are still there, and are not needed once the cluster is up.
bool HasOldLogs(const v1::ClusterConfig& cluster);
// Removes them, if there are any.
void RemoveOldLogs(const v1::ClusterConfig& cluster);

}  // namespace emberd::launcher
