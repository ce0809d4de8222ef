#include "base/buffers.h"

#include <array>
#include <bit>
#include <new>
#include <vector>

#include <sys/mman.h>

#include "base/mapped_memory.h"

namespace emberd {
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
      MutexLock lock(&mutex_);
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
      MutexLock lock(&mutex_);
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
  Mutex mutex_;
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
