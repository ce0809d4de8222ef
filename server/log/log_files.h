// What the log does to the disk, so that tests can put another disk in its place.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace emberd::log {

// A file that is open for writing. Thread-safe: several may write to different places at once.
class LogFile {
 public:
  virtual ~LogFile() = default;
  // All of the pieces, one behind another. After an error some of them may be there.
  virtual absl::Status Write(int64_t offset, absl::Span<const absl::Span<const char>> pieces) = 0;
  // Sets room aside, so that writing there does not fail for want of it. New bytes are zeros.
  virtual absl::Status Allocate(int64_t offset, int64_t bytes) = 0;
  virtual absl::Status Truncate(int64_t bytes) = 0;
  // Returns when the disk has all that was written before.
  virtual absl::Status Sync() = 0;
};

// Thread-safe. Errors name the file and are those of FileError (server/files/files.h).
class LogFiles {
 public:
  virtual ~LogFiles() = default;
  // An empty one. ALREADY_EXISTS if there is one.
  virtual absl::StatusOr<std::unique_ptr<LogFile>> Create(const std::string& path) = 0;
  // Of a file that some process has written before.
  virtual absl::Status Sync(const std::string& path) = 0;
  // Makes files that were made or removed in the folder survive a loss of power.
  virtual absl::Status SyncFolder(const std::string& folder) = 0;
  // What is gone already is no error.
  virtual absl::Status Remove(const std::string& path) = 0;
  // Nothing may stand under the other name.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  // A file that some process has written before; its bytes stay.
  virtual absl::StatusOr<std::unique_ptr<LogFile>> Open(const std::string& path) = 0;
  // 16 bytes that are others after the machine has lost power, or was started again for another
  // reason: only then may bytes be gone that a process wrote, but nobody synced.
  virtual std::string BootId() = 0;
};

// The disks of this machine.
LogFiles& DiskLogFiles();
// The same; but the tests' own build of the server has some that can lose what was not synced
// (tests/testing/power_loss.cc).
LogFiles& SystemLogFiles();

}  // namespace emberd::log
