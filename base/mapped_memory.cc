#include "base/mapped_memory.h"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

#include <sys/mman.h>

#include "absl/strings/str_cat.h"

namespace emberd {
namespace {

// Anonymous memory can have them unless the file says "always madvise [never]", or is not there.
bool KernelGivesHugePages() {
  static const bool gives = [] {
    std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
    std::string choices;
    return std::getline(file, choices) && choices.find("[never]") == std::string::npos;
  }();
  return gives;
}

}  // namespace

absl::StatusOr<MappedMemory> MappedMemory::Map(size_t bytes, bool huge_pages) {
  MappedMemory memory;
  if (bytes == 0) return memory;
  const size_t alignment = huge_pages ? kHugePage : 1;
  const size_t size = bytes + alignment - 1;
  void* mapping = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot map ", size, " bytes: ", strerror(errno)));
  }
  memory.mapping_ = static_cast<char*>(mapping);
  memory.mapping_size_ = size;
  memory.data_ = memory.mapping_ + (-reinterpret_cast<uintptr_t>(mapping) & (alignment - 1));
  memory.size_ = bytes;
  // Advice only: a kernel without huge pages refuses and everything works, slower.
  const int refused = madvise(memory.data_, bytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  memory.huge_pages_ = huge_pages && refused == 0 && KernelGivesHugePages();
  return memory;
}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_size_, other.mapping_size_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(huge_pages_, other.huge_pages_);
  return *this;
}

void MappedMemory::Clear() {
  if (size_ > 0) madvise(data_, size_, MADV_DONTNEED);
}

MappedMemory::~MappedMemory() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_size_);
}

}  // namespace emberd
