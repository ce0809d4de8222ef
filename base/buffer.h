// A growing array of plain values that is never zeroed and keeps its memory for the next batch.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

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

}  // namespace emberd
