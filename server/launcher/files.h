// Small files that processes hand to each other.
#pragma once

#include <optional>
#include <string>

#include <sys/types.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::launcher {

// A reader sees the old content or the new one, never a part. A file that is there keeps its mode
// and, where this process may give files away, its owner.
absl::Status WriteFileAtomically(const std::string& path, const std::string& content);

// What a process says once it serves.
struct ReadyInfo {
  std::string grpc;  // host:port with the real port
  std::string http;  // empty: /metrics is off
  pid_t pid = 0;
};

// "grpc=HOST:PORT\nhttp=HOST:PORT\npid=N\n", written atomically.
absl::Status WriteReadyFile(const std::string& path, const ReadyInfo& info);
// NOT_FOUND: not there (yet). INVALID_ARGUMENT: something else.
absl::StatusOr<ReadyInfo> ReadReadyFile(const std::string& path);

// Whether a process can use the folders that its `storage` names, before it says that it is there:
// makes storage.directory, and writes to it and to storage.checkpoints; with durability LOG also to
// the folder of this shard, or of all, whose logs must be readable. INVALID_ARGUMENT with the
// field, the path and what to do; UNAVAILABLE where it may pass, as of a disk that does not answer.
// A full disk is neither: shards wait for room. No `storage`: OK. INVALID_ARGUMENT for durability
// CHECKPOINT where a shard has a log. FAILED_PRECONDITION for one shard: a move (shard_count.h) has
// not ended.
absl::Status CheckStorage(const v1::ClusterConfig& cluster,
                          std::optional<int> shard = std::nullopt);

}  // namespace emberd::launcher
