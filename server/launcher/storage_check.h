// Whether a process can use the folders that its `storage` names, before it says that it is there.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::launcher {

// Makes storage.directory, and writes to it and to storage.checkpoints; with durability LOG also to
// the folders of these shards, whose logs must be readable. INVALID_ARGUMENT with the field, the
// path and what to do. A full disk is none of that: shards wait for room. No `storage`: OK.
absl::Status CheckStorage(const v1::ClusterConfig& cluster, const std::vector<int>& shards);
// The same for all shards.
absl::Status CheckStorage(const v1::ClusterConfig& cluster);

}  // namespace emberd::launcher
