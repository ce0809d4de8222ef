// Memory that two processes share: a sealed memory file, mapped by both. And what goes over the
// socket between RegionServer and SharedArena, once LocalServer has let it in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "base/file_descriptor.h"

namespace emberd {

// Tensors in shared memory begin at multiples of so many bytes of their block.
inline constexpr size_t kTensorAlignment = 64;
inline size_t AlignTensor(size_t bytes) {
  return (bytes + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
}

// A mapping of a sealed memory file. It is zero until somebody writes to it, and costs nothing
// until touched. Whoever has the file can write to it at any time, but nobody can make it shorter:
// to read and write the mapping is always safe, whatever the other process does. Thread-safe.
class SharedRegion {
 public:
  // A new file; `name` shows in /proc. RESOURCE_EXHAUSTED if the system gives none.
  static absl::StatusOr<std::shared_ptr<SharedRegion>> Create(const char* name, size_t bytes);
  // The file that another process has created. INVALID_ARGUMENT if it has another size, or could be
  // made shorter.
  static absl::StatusOr<std::shared_ptr<SharedRegion>> Map(FileDescriptor file, size_t bytes);

  ~SharedRegion();

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

// One packet goes each way at a time.
namespace regions {

enum Kind : uint32_t {
  kTake = 1,  // a new region of `bytes`
  kDrop = 2,  // `region` is not used any more; has no answer
  kLend = 3,  // with the file of `region`, which has `bytes` and is another server's
};
struct Request {
  uint32_t kind = 0;
  uint32_t reserved = 0;
  uint64_t region = 0;
  uint64_t bytes = 0;
};
// To kTake, with the region's file if `region` is not 0. To kLend: `region` is 0 if it is not
// wanted.
struct Answer {
  uint64_t region = 0;
  uint64_t bytes = 0;  // of the region; where there is none, those that could be had
};

// Both never raise SIGPIPE. `file`: -1 for none. False if the packet could not be sent, at once
// with MSG_DONTWAIT.
template <typename Packet>
bool SendPacket(int socket, const Packet& packet, int flags, int file = -1);
// Nothing if there is none, or it is not one of these, or more than one file came with it. `file`:
// what came with it.
std::optional<Request> ReceiveRequest(int socket, FileDescriptor* file);
std::optional<Answer> ReceiveAnswer(int socket, FileDescriptor* file);

}  // namespace regions

}  // namespace emberd
