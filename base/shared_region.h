// Memory that two processes share: a sealed memory file, mapped by both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "base/file_descriptor.h"

namespace emberd {

// A mapping of one. It is zero until somebody writes to it, and costs nothing until touched.
// Whoever has the file can write to it at any time, but nobody can make it shorter: to read and
// write the mapping is always safe, whatever the other process does. Thread-safe.
class SharedRegion {
 public:
  // A new file; `name` shows in /proc. RESOURCE_EXHAUSTED if the system gives none.
  static absl::StatusOr<std::shared_ptr<SharedRegion>> Create(const char* name, size_t bytes);
  // The file that another process has created. INVALID_ARGUMENT if it has another size, or could be
  // made shorter.
  static absl::StatusOr<std::shared_ptr<SharedRegion>> Map(FileDescriptor file, size_t bytes);

  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  char* data() const { return data_; }
  size_t size() const { return size_; }
  int descriptor() const { return file_.get(); }
  // What is written here from now on to the pages of these bytes stays in this process, and others
  // keep what they see now. Both must be multiples of a page. False: the system refused.
  bool KeepFromOthers(uint64_t offset, uint64_t bytes);
  // Whether `bytes` from `offset` on lie inside.
  bool Holds(uint64_t offset, uint64_t bytes) const {
    return bytes <= size_ && offset <= size_ - bytes;
  }

 private:
  SharedRegion(FileDescriptor file, char* data, size_t size)
      : file_(std::move(file)), data_(data), size_(size) {}
  static absl::StatusOr<std::shared_ptr<SharedRegion>> MapFile(FileDescriptor file, size_t bytes);

  const FileDescriptor file_;
  char* const data_;
  const size_t size_;
};

}  // namespace emberd
