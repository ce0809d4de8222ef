// Reads the rows of a checkpoint into a model that is being made.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "base/blocking_pool.h"
#include "server/checkpoint/partition_chain.h"
#include "server/shard/save_files.h"
#include "shard/store/model.h"

namespace emberd::server {

// Reads every `shards`-th file of the chain, from number `shard` on, and compares checksums.
absl::Status CheckFiles(const CheckpointChain& chain, int shard, int shards,
                        ShardProgress& progress);

// Whether the model's rows stand in files of its partitions just as they stand in memory: the
// checkpoint was saved with the same number of partitions, and rows are stored in the same way.
bool SamePlaces(const shard::Model& model, const v1::CheckpointManifest& manifest);

// About how many bytes of weights of the checkpoint go to one shard, stored as `spec` says: rows
// are spread evenly. Those that several checkpoints of the chain hold count as often.
int64_t BytesToLoad(const shard::ModelSpec& spec, const CheckpointChain& chain);

// Gives the model the rows of its partitions; where the places are not the same, row by row, by
// table and id. Rows that the checkpoint does not hold stay without a value. `threads` reads
// partitions at the same time.
absl::Status LoadRows(shard::Model& model, const CheckpointChain& chain, BlockingPool* threads,
                      ShardProgress& progress);

}  // namespace emberd::server
