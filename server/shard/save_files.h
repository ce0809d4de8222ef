// Writes the rows of a snapshot to the files of a checkpoint.
#pragma once

#include <atomic>
#include <string>

#include "absl/status/status.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "shard/snapshot/snapshot.h"

namespace emberd::server {

// How far a save or restore is. Thread-safe.
struct ShardProgress {
  std::atomic<int64_t> bytes{0};
  std::atomic<int64_t> total_bytes{0};
  std::atomic<bool> cancelled{false};
};

using CheckpointFiles = google::protobuf::RepeatedPtrField<v1::CheckpointFile>;

// Reads the snapshot to its end. Files of arrays without a row are not made.
absl::Status SaveRows(shard::Snapshot& snapshot, const std::string& folder, ShardProgress& progress,
                      CheckpointFiles* files);

}  // namespace emberd::server
