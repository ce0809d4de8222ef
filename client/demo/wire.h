// Messages between the processes of the demo over a socket pair: both ends are this very program on
// this machine, so numbers travel as they lie in memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace emberd::demo {

struct Frame {
  uint32_t kind = 0;
  std::string payload;
};

// Blocks until all is sent. UNAVAILABLE: the other end is gone.
absl::Status SendFrame(int socket, uint32_t kind, std::string_view payload);

// Frames out of a socket's bytes. Not thread-safe.
class FrameReader {
 public:
  explicit FrameReader(int socket) : socket_(socket) {}

  // Blocks for the next frame. UNAVAILABLE: the other end is gone.
  absl::StatusOr<Frame> Receive();
  // Takes in what has arrived, without waiting. UNAVAILABLE: the other end is gone.
  absl::Status Poll();
  // The next frame that is complete, if any.
  std::optional<Frame> Next();

 private:
  absl::Status Read(int flags);

  int socket_;
  std::string bytes_;
};

// Puts numbers and runs of numbers one behind the other, and takes them out in the same order.
class Packer {
 public:
  template <typename T>
  Packer& Add(const T& value) {
    static_assert(std::is_arithmetic_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(T));
    return *this;
  }
  Packer& Add(const float* values, int64_t count) {
    Add(count);
    bytes_.append(reinterpret_cast<const char*>(values), count * sizeof(float));
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  Unpacker& Take(T* value) {
    static_assert(std::is_arithmetic_v<T>);
    return Copy(value, sizeof(T));
  }
  Unpacker& Take(std::vector<float>* values) {
    int64_t count = 0;
    Take(&count);
    if (count < 0 || static_cast<uint64_t>(count) > bytes_.size() / sizeof(float))
      count = 0, ok_ = false;
    values->resize(count);
    return Copy(values->data(), count * sizeof(float));
  }
  // True if nothing was missing and nothing is left.
  bool Done() const { return ok_ && bytes_.empty(); }

 private:
  Unpacker& Copy(void* to, size_t size) {
    ok_ = ok_ && size <= bytes_.size();
    if (!ok_ || size == 0) return *this;
    std::memcpy(to, bytes_.data(), size);
    bytes_.remove_prefix(size);
    return *this;
  }

  std::string_view bytes_;
  bool ok_ = true;
};

}  // namespace emberd::demo
