// A shard and the files of a checkpoint: writing the rows of a snapshot, reading them into a model
// that is being made, and reading what the shards knew besides rows: requests that were carried
// out, groups, counters.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/thread_pools.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/internal/v1/shard_state.pb.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "server/checkpoint/partition_file.h"
#include "shard/snapshot/snapshot.h"
#include "shard/store/model.h"

namespace emberd::host {

// How far a save or restore is. Thread-safe.
struct ShardProgress {
  std::atomic<int64_t> bytes{0};
  std::atomic<int64_t> total_bytes{0};
  std::atomic<bool> cancelled{false};
};

using CheckpointFiles = google::protobuf::RepeatedPtrField<v1::CheckpointFile>;

// Reads the snapshot to its end. Each model of it has a folder and its files: rows that several
// have go to all of them. Files of arrays without a row are not made.
absl::Status SaveRows(shard::Snapshot& snapshot, absl::Span<const std::string> folders,
                      ShardProgress& progress, absl::Span<CheckpointFiles> files);

// VerifyChain of every `shards`-th file, from number `shard` on.
absl::Status CheckFiles(const checkpoint::CheckpointChain& chain, int shard, int shards,
                        ShardProgress& progress);

// Whether the model's rows stand in files of its partitions just as they stand in memory: the
// checkpoint was saved with the same number of partitions, and rows are stored in the same way.
bool SamePlaces(const shard::Model& model, const v1::CheckpointManifest& manifest);
// Whether the same is true of slots, and there are no others: what changes from then on can be
// saved as a checkpoint that builds on this one.
bool SameArrays(const shard::Model& model, const v1::CheckpointManifest& manifest);

// About how many bytes of weights of the checkpoint go to one shard, stored as `spec` says: rows
// are spread evenly. Those that several checkpoints of the chain hold count as often.
int64_t BytesToLoad(const shard::ModelSpec& spec, const checkpoint::CheckpointChain& chain);

// Gives the model the rows of its partitions; where the places are not the same, row by row, by
// table and id. Rows that the checkpoint does not hold stay without a value. `threads` reads
// partitions at the same time. `epoch`: the first whose changes follow (Engine::SetEpoch); rows
// that are shared, and have been loaded for as late a one, stay as they are.
absl::Status LoadRows(shard::Model& model, const checkpoint::CheckpointChain& chain,
                      BlockingPool* threads, ShardProgress& progress, uint64_t epoch = 0);

// For shard `shard` of `shards`. Every shard has carried out the same requests, but each counts its
// own rows: if the checkpoint was saved on another number of shards, shard 0 answers with the rows
// of all. DATA_LOSS, with the file's name, if a file is not whole.
absl::StatusOr<internal::v1::ShardState> LoadState(const internal::v1::CheckpointSource& newest,
                                                   int shard, int shards);

}  // namespace emberd::host
