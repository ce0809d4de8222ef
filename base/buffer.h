// Memory that is kept for the next batch: arrays that grow, and objects that hold some.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace emberd {

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
      MutexLock lock(&mutex_);
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
    MutexLock lock(&mutex_);
    if (idle_.size() < keep_) idle_.push_back(std::move(object));
  }

 private:
  static constexpr int64_t kMostBytes = int64_t{64} << 20;

  const size_t keep_;
  Mutex mutex_;
  std::vector<std::unique_ptr<T>> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd
