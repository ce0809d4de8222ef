// Bytes on disk for a while: written once, front to back, and read once or more the same way.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/file_descriptor.h"

namespace emberd::shard {

// The file has no name in its folder, so nobody can take it away: it goes with this object, and
// with the process, however that ends. Movable, not thread-safe.
class SpillFile {
 public:
  // FAILED_PRECONDITION, with the reason: nothing can be written in `folder`. It must exist.
  static absl::StatusOr<SpillFile> Create(const std::string& folder);

  // RESOURCE_EXHAUSTED: the disk is full, or the file would be longer than `limit`. After an error
  // the file is of no use.
  absl::Status Write(absl::Span<const char> bytes);
  void set_limit(int64_t bytes) { limit_ = bytes; }
  int64_t bytes() const { return bytes_; }

  void Rewind();
  // The next bytes, into all of `bytes`. DATA_LOSS, with the name that the file had, under which
  // the open files of the process still show it: they cannot be read.
  absl::Status Read(absl::Span<char> bytes);
  // After the last byte was read. DATA_LOSS: not what was written.
  absl::Status CheckRead() const;

 private:
  SpillFile(std::string path, FileDescriptor file)
      : path_(std::move(path)), file_(std::move(file)) {}

  std::string path_;  // until it was taken out of its folder
  FileDescriptor file_;
  int64_t limit_ = INT64_MAX;
  int64_t bytes_ = 0;
  uint32_t crc_ = 0;  // of what was written
  int64_t read_ = 0;
  uint32_t read_crc_ = 0;
};

}  // namespace emberd::shard
