// Files of blobs that a log no longer needs, kept for its later segments: the system has their
// pages and the disk their places already, which would otherwise be looked for again with every
// page that is written. Their old bytes do no harm, for records name blobs with a checksum.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "server/log/log_files.h"

namespace emberd::server {

// Thread-safe.
class SpareBlobs {
 public:
  // At most so many bytes are kept, and no more than what is left of the disk. `files` outlives it.
  SpareBlobs(LogFiles& files, std::string folder, int64_t most_bytes)
      : files_(files), folder_(std::move(folder)), most_bytes_(most_bytes) {}

  // What an earlier process kept.
  void Find();
  // Takes the file of blobs of this segment out of the log. What is gone already is no error.
  absl::Status Keep(uint64_t segment);
  // A file for the blobs of a new segment: the one that was kept last, or a new one.
  absl::StatusOr<std::unique_ptr<LogFile>> Take(uint64_t segment);
  // Gives the disk its space back. False: there was nothing to give.
  bool Clear();

 private:
  struct Spare {
    uint64_t segment;
    int64_t bytes;
  };
  // Whether there is room for one more.
  bool HasRoom(int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  LogFiles& files_;
  const std::string folder_;
  const int64_t most_bytes_;
  Mutex mutex_;
  std::vector<Spare> spares_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::server
