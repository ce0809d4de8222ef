// What the shards of a checkpoint knew besides rows: requests that were carried out, groups,
// counters.
#pragma once

#include "absl/status/statusor.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/internal/v1/shard_state.pb.h"

namespace emberd::host {

// For shard `shard` of `shards`. Every shard has carried out the same requests, but each counts its
// own rows: where the checkpoint was saved on another number of shards, the first one of now
// answers with the rows of all. DATA_LOSS, with the file's name, if a file is not whole.
absl::StatusOr<internal::v1::ShardState> LoadState(const internal::v1::CheckpointSource& newest,
                                                   int shard, int shards);

}  // namespace emberd::host
