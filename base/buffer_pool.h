// Buffers of the hot path, kept between requests: no allocation, no page fault and no zeroing once
// warm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/types/span.h"

namespace emberd {

class PooledBytes;

// Thread-safe. Buffers may outlive the handle to the pool.
class BufferPool {
 public:
  // Idle buffers are kept up to `idle_limit` bytes in all.
  explicit BufferPool(size_t idle_limit = size_t{1} << 30);
  // Never fails for want of memory short of the kernel's own out-of-memory handling.
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

}  // namespace emberd
