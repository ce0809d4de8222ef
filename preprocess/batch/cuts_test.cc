#include "preprocess/batch/cuts.h"

#include <array>

#include <gtest/gtest.h>

#include "base/testing/seed.h"
#include "tests/testing/random_case.h"

namespace emberd::preprocess {
namespace cuts_test {

using Counts = std::array<int32_t, kBuckets>;

Counts RandomCounts(Random& random, int most) {
  Counts counts;
  for (int32_t& count : counts) count = std::uniform_int_distribution<int>(0, most)(random);
  return counts;
}

int64_t LargestMinibatch(const Counts& counts, CutSet cuts) {
  std::array<int64_t, kBuckets> sums = {};
  for (int b = 0; b < kBuckets; ++b) sums[MinibatchOf(cuts, b)] += counts[b];
  return *std::max_element(sums.begin(), sums.end());
}

TEST(CutsTest, NumberingsAreOneToOne) {
  const CutSet all = ~CutSet{1};
  EXPECT_EQ(JaxMask(all), ~uint64_t{0} >> 1);
  EXPECT_EQ(TensorFlowMask(all), ~uint64_t{0} >> 1);
  EXPECT_EQ(JaxMask(CutSet{1} << 32), uint64_t{1} << 62);  // JAX's root is its last node
  EXPECT_EQ(TensorFlowMask(CutSet{1} << 32), 1u);          // TensorFlow's is its first
}

TEST(CutsTest, MinibatchesOfBuckets) {
  const CutSet cuts = CutSet{1} << 1 | CutSet{1} << 40 | CutSet{1} << 63;
  EXPECT_EQ(MinibatchCount(cuts), 4);
  EXPECT_EQ(MinibatchOf(cuts, 0), 0);
  EXPECT_EQ(MinibatchOf(cuts, 1), 1);
  EXPECT_EQ(MinibatchOf(cuts, 39), 1);
  EXPECT_EQ(MinibatchOf(cuts, 40), 2);
  EXPECT_EQ(MinibatchOf(cuts, 63), 3);
  EXPECT_EQ(MinibatchOf(0, 63), 0);
}

// Would catch: cuts that leave a mini-batch over the limit, or cut where nothing asks for it.
TEST(CutsTest, CutsKeepTheLimitAndStayAwayBelowIt) {
  Random random(TestSeed(1));
  for (int n = 0; n < 2000; ++n) {
    const Counts counts = RandomCounts(random, n % 50);
    const int64_t biggest = *std::max_element(counts.begin(), counts.end());
    const int64_t limit = biggest + 1 + n % 200;
    int64_t total = 0;
    for (int32_t count : counts) total += count;
    const CutSet jax = JaxCuts(counts.data(), limit);
    EXPECT_LE(LargestMinibatch(counts, jax), limit);
    EXPECT_EQ(jax == 0, total <= limit);
    CutSet tried = 0;
    const CutSet tensorflow = TensorFlowCuts(counts.data(), counts.data(), {limit, 0}, &tried);
    EXPECT_LE(LargestMinibatch(counts, tensorflow), limit);
    EXPECT_EQ(tensorflow == 0, total <= limit);
    EXPECT_EQ(tensorflow & ~tried, 0u);
    // Cuts of somebody else only make mini-batches smaller.
    EXPECT_LE(LargestMinibatch(counts, jax | CutSet{random()} << 1), limit);
  }
}

TEST(CutsTest, NoLimitNoCuts) {
  const Counts counts = [] {
    Counts c;
    c.fill(1000000);
    return c;
  }();
  EXPECT_EQ(JaxCuts(counts.data(), 0), 0u);
  CutSet tried = 0;
  EXPECT_EQ(TensorFlowCuts(counts.data(), counts.data(), {0, 0}, &tried), 0u);
}

}  // namespace cuts_test
}  // namespace emberd::preprocess
