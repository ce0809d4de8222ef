// Restores rows into other places than those that they were saved from: another number of
// partitions, other stacks, another storage type, or an optimizer with other slots.
#pragma once

#include "absl/status/status.h"
#include "server/shard/load_files.h"
#include "shard/store/stack_store.h"

namespace emberd::server {

// Reads the rows of the store's k-th partition, by table and id. Columns of padding are 0, and
// slots that the checkpoint does not have keep their initial values.
absl::Status RemapPartition(shard::StackStore& store, int k, const CheckpointChain& chain,
                            ShardProgress& progress);

}  // namespace emberd::server
