#include "base/buffers.h"

#include <array>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <new>
#include <string>
#include <vector>

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

namespace {

constexpr size_t kSmallest = 4096;
constexpr int kClasses = 256;

// Size classes in steps of a quarter of a power of two: at most 25 % of a buffer is unused.
int ClassOf(size_t bytes) {
  const size_t units = (bytes + kSmallest - 1) / kSmallest;
  if (units <= 4) return units == 0 ? 0 : static_cast<int>(units) - 1;
  const int log = std::bit_width(units - 1) - 1;  // 2^log <= units - 1
  return 4 * (log - 1) + static_cast<int>((units - 1) >> (log - 2)) - 4;
}

size_t ClassBytes(int size_class) {
  if (size_class < 4) return (size_class + 1) * kSmallest;
  const int log = size_class / 4 + 1;
  return (size_t{1} << (log - 2)) * (size_class % 4 + 5) * kSmallest;
}

size_t Alignment(size_t bytes) { return bytes >= kHugePage ? kHugePage : 64; }

char* Allocate(size_t bytes) {
  void* data = ::operator new(bytes, std::align_val_t(Alignment(bytes)));
  if (bytes >= kHugePage) madvise(data, bytes, MADV_HUGEPAGE);
  return static_cast<char*>(data);
}

void Free(char* data, size_t bytes) { ::operator delete(data, std::align_val_t(Alignment(bytes))); }

}  // namespace

class BufferPool::Store {
 public:
  explicit Store(size_t idle_limit) : idle_limit_(idle_limit) {}
  ~Store() {
    for (int c = 0; c < kClasses; ++c) {
      for (char* data : idle_[c]) Free(data, ClassBytes(c));
    }
  }

  char* Get(int size_class) {
    {
      absl::MutexLock lock(&mutex_);
      std::vector<char*>& idle = idle_[size_class];
      if (!idle.empty()) {
        char* data = idle.back();
        idle.pop_back();
        idle_bytes_ -= ClassBytes(size_class);
        return data;
      }
    }
    return Allocate(ClassBytes(size_class));
  }

  void Put(int size_class, char* data) {
    {
      absl::MutexLock lock(&mutex_);
      if (idle_bytes_ + ClassBytes(size_class) <= idle_limit_) {
        idle_bytes_ += ClassBytes(size_class);
        idle_[size_class].push_back(data);
        return;
      }
    }
    Free(data, ClassBytes(size_class));
  }

 private:
  const size_t idle_limit_;
  absl::Mutex mutex_;
  std::array<std::vector<char*>, kClasses> idle_ ABSL_GUARDED_BY(mutex_);
  size_t idle_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

BufferPool::BufferPool(size_t idle_limit) : store_(std::make_shared<Store>(idle_limit)) {}

PooledBytes BufferPool::Get(size_t bytes) { return PooledBytes(store_, ClassOf(bytes)); }

PooledBytes::PooledBytes(std::shared_ptr<BufferPool::Store> store, int size_class)
    : store_(std::move(store)), size_class_(size_class), data_(store_->Get(size_class)) {}

PooledBytes& PooledBytes::operator=(PooledBytes&& other) noexcept {
  std::swap(store_, other.store_);
  std::swap(size_class_, other.size_class_);
  std::swap(data_, other.data_);
  return *this;
}

size_t PooledBytes::capacity() const { return data_ == nullptr ? 0 : ClassBytes(size_class_); }

PooledBytes::~PooledBytes() {
  if (store_ != nullptr) store_->Put(size_class_, data_);
}

}  // namespace emberd
