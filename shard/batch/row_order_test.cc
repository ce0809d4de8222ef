#include "shard/batch/row_order.h"

#include <algorithm>
#include <tuple>

#include <gtest/gtest.h>

#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace {

using Shape = std::tuple<int, int64_t, int>;  // partitions, rows per partition, samples

class RowOrderTest : public ::testing::TestWithParam<Shape> {};

// Prevents a sort that is not stable, or that forgets high digits of the row: a row's gradients
// would be summed in another order, or in two pieces.
TEST_P(RowOrderTest, OrdersByRowAndSample) {
  std::mt19937_64 random(testing::TestSeed());
  const auto [partitions, rows, samples] = GetParam();
  const testing::TestShape shape{partitions, rows, samples};
  std::vector<testing::TestEntry> entries = testing::RandomEntries(shape, 5, random);
  testing::TestBatch batch(entries, shape, 0, partitions, 2, 1);
  BufferPool pool;
  Executor executor(1);
  const StackEntries stack = *ArrangeEntries(batch.view(), {partitions, rows}, pool, executor);
  std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.partition, a.row) < std::tie(b.partition, b.row);
  });
  auto expected = entries.begin();
  for (int k = 0; k < partitions; ++k) {
    const PooledArray<Touch> touches = OrderByRow({&stack}, k, rows, pool);
    ASSERT_EQ(touches.size(), static_cast<size_t>(stack.partition_entries[k] + kTouchPadding));
    for (int64_t i = 0; i < stack.partition_entries[k]; ++i, ++expected) {
      ASSERT_EQ(expected->partition, k);
      ASSERT_EQ(static_cast<int32_t>(touches[i].row), expected->row);
      ASSERT_EQ(stack.samples[touches[i].sample], expected->sample);
      ASSERT_EQ(touches[i].gain, expected->gain);
    }
  }
  EXPECT_EQ(expected, entries.end());
}

INSTANTIATE_TEST_SUITE_P(Shapes, RowOrderTest,
                         ::testing::Values(Shape{1, 8, 3}, Shape{1, 100, 2000},
                                           Shape{4, 1 << 11, 3000}, Shape{2, (1 << 11) + 1, 3000},
                                           Shape{2, 5'000'000, 3000},
                                           Shape{1, 2'000'000'000, 3000}));

}  // namespace
}  // namespace emberd::shard
