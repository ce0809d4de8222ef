#include "client/cpp/float_pool.h"

#include <algorithm>
#include <cstdint>

#include "gtest/gtest.h"

namespace emberd::client {
namespace {

TEST(FloatPoolTest, GivesBlocksAgainThatAreLargeEnough) {
  auto pool = std::make_unique<FloatPool>();
  const float* first = pool->Take(100).get();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0u);
  std::shared_ptr<float> again = pool->Take(50);
  EXPECT_EQ(again.get(), first);
  std::shared_ptr<float> other = pool->Take(50);
  EXPECT_NE(other.get(), first);
  other.reset();
  EXPECT_NE(pool->Take(1000), nullptr);
  pool.reset();
  std::fill_n(again.get(), 100, 1.0f);  // outlives its pool
}

}  // namespace
}  // namespace emberd::client
