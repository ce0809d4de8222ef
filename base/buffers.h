// Memory of the hot path: large and straight from the kernel; or kept for the next batch, as arrays
// that grow, objects that hold some, and buffers from a pool. No allocation, no page fault and no
// zeroing once warm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"

namespace emberd {

// Tensors begin at multiples of so many bytes of the memory that they share.
inline constexpr size_t kTensorAlignment = 64;
inline size_t AlignTensor(size_t bytes) {
  return (bytes + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
}

// ---- From the kernel

inline constexpr size_t kHugePage = size_t{2} << 20;

// Zero-filled memory that costs nothing until touched, and can be backed by huge pages. Owns a
// mapping. Movable, not copyable.
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

// ---- Kept for the next batch

// An array that grows.
template <typename T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  // Makes room for n values; what was in the buffer is lost if it had to grow.
  T* Reserve(int64_t n) {
    if (n > capacity_) {
      data_.reset();  // first, so that old and new are never held together
      capacity_ = n + n / 4;
      data_.reset(static_cast<T*>(::operator new(capacity_ * sizeof(T), kAlignment)));
    }
    return data_.get();
  }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  int64_t bytes() const { return capacity_ * static_cast<int64_t>(sizeof(T)); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(T* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<T, Delete> data_;
  int64_t capacity_ = 0;
};

// Objects with grown buffers, kept for the next user. Thread-safe. At most `keep` idle objects
// stay, of 64 MiB at most each; others are freed.
template <typename T>
class Recycler {
 public:
  explicit Recycler(size_t keep) : keep_(keep) { idle_.reserve(keep); }

  std::unique_ptr<T> Take() {
    {
      absl::MutexLock lock(&mutex_);
      if (!idle_.empty()) {
        std::unique_ptr<T> object = std::move(idle_.back());
        idle_.pop_back();
        return object;
      }
    }
    return std::make_unique<T>();
  }

  void Give(std::unique_ptr<T> object) {
    if (object->bytes() > kMostBytes) return;
    absl::MutexLock lock(&mutex_);
    if (idle_.size() < keep_) idle_.push_back(std::move(object));
  }

 private:
  static constexpr int64_t kMostBytes = int64_t{64} << 20;

  const size_t keep_;
  absl::Mutex mutex_;
  std::vector<std::unique_ptr<T>> idle_ ABSL_GUARDED_BY(mutex_);
};

class PooledBytes;

// Thread-safe. Buffers may outlive the handle to the pool.
class BufferPool {
 public:
  // Idle buffers are kept up to `idle_limit` bytes in all.
  explicit BufferPool(size_t idle_limit = size_t{1} << 30);
  // There is no error for want of memory: a process that gets none ends.
  PooledBytes Get(size_t bytes);

 private:
  friend class PooledBytes;
  class Store;
  std::shared_ptr<Store> store_;
};

// Bytes aligned to 64 that go back to their pool when destroyed. Contents are undefined at first.
class PooledBytes {
 public:
  PooledBytes() = default;
  PooledBytes(PooledBytes&& other) noexcept { *this = std::move(other); }
  PooledBytes& operator=(PooledBytes&& other) noexcept;
  ~PooledBytes();
  char* data() const { return data_; }
  // What it takes, which is more than was asked for; 0: none.
  size_t capacity() const;

 private:
  friend class BufferPool;
  PooledBytes(std::shared_ptr<BufferPool::Store> store, int size_class);

  std::shared_ptr<BufferPool::Store> store_;
  int size_class_ = 0;
  char* data_ = nullptr;
};

// A fixed-size array of trivial values in a pooled buffer. Movable. Contents are undefined at
// first.
template <class T>
class PooledArray {
 public:
  PooledArray() = default;
  PooledArray(BufferPool& pool, size_t size) : bytes_(pool.Get(Bytes(size))), size_(size) {}
  T* data() { return reinterpret_cast<T*>(bytes_.data()); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.data()); }
  size_t size() const { return size_; }
  size_t bytes() const { return bytes_.capacity(); }  // that it takes
  T& operator[](size_t i) { return data()[i]; }
  const T& operator[](size_t i) const { return data()[i]; }
  operator absl::Span<const T>() const { return {data(), size_}; }

 private:
  // More than there can be: no memory is given for it.
  static size_t Bytes(size_t size) {
    return size <= PTRDIFF_MAX / sizeof(T) ? size * sizeof(T) : PTRDIFF_MAX;
  }

  PooledBytes bytes_;
  size_t size_ = 0;
};

// Keeps both alive until the last reference to it goes; the second goes first.
template <typename First, typename Second>
std::shared_ptr<const void> KeepBoth(First first, Second second) {
  return std::make_shared<std::pair<First, Second>>(std::move(first), std::move(second));
}

}  // namespace emberd
