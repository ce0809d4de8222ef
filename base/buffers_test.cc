#include "base/buffers.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

namespace emberd {
namespace buffers_test {

TEST(BufferPool, BuffersAreAlignedAndLargeEnough) {
  BufferPool pool;
  for (size_t bytes = 0; bytes < (size_t{9} << 20); bytes = bytes * 5 / 3 + 1) {
    const PooledBytes buffer = pool.Get(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
    std::memset(buffer.data(), 1, bytes);  // for AddressSanitizer
  }
}

TEST(BufferPool, ReusesMemoryOfTheSameClass) {
  BufferPool pool;
  PooledBytes buffer = pool.Get(100000);
  const char* data = buffer.data();
  buffer = PooledBytes();
  EXPECT_EQ(pool.Get(99000).data(), data);
}

TEST(BufferPool, LiveBuffersDoNotOverlap) {
  BufferPool pool;
  std::vector<PooledArray<uint64_t>> arrays;
  for (size_t i = 0; i < 200; ++i) {
    arrays.emplace_back(pool, 1 + i * 37 % 3000);
    for (size_t j = 0; j < arrays.back().size(); ++j) arrays.back()[j] = i;
    if (i % 3 == 0) arrays[i / 2] = PooledArray<uint64_t>();
  }
  for (size_t i = 0; i < arrays.size(); ++i) {
    for (size_t j = 0; j < arrays[i].size(); ++j) ASSERT_EQ(arrays[i][j], i);
  }
}

TEST(BufferPool, BuffersMayOutliveThePool) {
  PooledBytes buffer;
  {
    BufferPool pool;
    buffer = pool.Get(5000);
  }
  std::memset(buffer.data(), 7, 5000);
}

}  // namespace buffers_test
}  // namespace emberd
