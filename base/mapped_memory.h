// Large zero-filled memory straight from the kernel: costs nothing until touched, and can be backed
// by huge pages.
#pragma once

#include <cstddef>
#include <utility>

#include "absl/status/statusor.h"

namespace emberd {

inline constexpr size_t kHugePage = size_t{2} << 20;

// Owns a mapping. Movable, not copyable.
class MappedMemory {
 public:
  // `bytes` zero bytes, aligned to 2 MiB where huge pages are asked for and to 4 KiB otherwise.
  // RESOURCE_EXHAUSTED if the address space is full.
  static absl::StatusOr<MappedMemory> Map(size_t bytes, bool huge_pages);

  MappedMemory() = default;
  MappedMemory(MappedMemory&& other) noexcept { *this = std::move(other); }
  MappedMemory& operator=(MappedMemory&& other) noexcept;
  ~MappedMemory();

  // Gives the memory back; every byte is zero again.
  void Clear();

  char* data() const { return data_; }
  size_t size() const { return size_; }
  // Asked for, and the kernel gives them.
  bool huge_pages() const { return huge_pages_; }

 private:
  char* mapping_ = nullptr;
  size_t mapping_size_ = 0;
  char* data_ = nullptr;
  size_t size_ = 0;
  bool huge_pages_ = false;
};

}  // namespace emberd
