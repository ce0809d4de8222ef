// Small files that processes hand to each other.
#pragma once

#include <string>

#include <sys/types.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace emberd::launcher {

// A reader sees the old content or the new one, never a part.
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

}  // namespace emberd::launcher
