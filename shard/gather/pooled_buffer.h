// What a gather writes its results into.
#pragma once

#include <cstdint>

#include "base/buffer_pool.h"
#include "shard/engine.h"

namespace emberd::shard {

template <typename T>
class PooledBuffer final : public ResultBuffer<T> {
 public:
  PooledBuffer(BufferPool& pool, int64_t size) : values_(pool, size) {}
  T* data() override { return values_.data(); }
  const T* data() const override { return values_.data(); }
  int64_t size() const override { return static_cast<int64_t>(values_.size()); }

 private:
  PooledArray<T> values_;
};

}  // namespace emberd::shard
