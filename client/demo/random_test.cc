#include "client/demo/random.h"

#include <cmath>
#include <set>

#include <gtest/gtest.h>

namespace emberd::demo {
namespace {

TEST(DrawsTest, DependOnTheirKeyAlone) {
  Draws first(1, 2, 3);
  const uint64_t bits = first.Bits();
  Draws(1, 2, 4).Bits();
  EXPECT_EQ(Draws(1, 2, 3).Bits(), bits);
  EXPECT_NE(Draws(1, 2, 4).Bits(), bits);
  EXPECT_NE(Draws(1, 3, 3).Bits(), bits);
  EXPECT_NE(Draws(2, 2, 3).Bits(), bits);
}

TEST(DrawsTest, NormalHasMeanZeroAndVarianceOne) {
  double sum = 0, squares = 0;
  constexpr int kCount = 200'000;
  for (int i = 0; i < kCount; ++i) {
    const double x = Draws(7, i, 0).Normal();
    sum += x;
    squares += x * x;
  }
  // Five standard errors; the draws are fixed, so this cannot flicker.
  EXPECT_NEAR(sum / kCount, 0, 5 / std::sqrt(kCount));
  EXPECT_NEAR(squares / kCount, 1, 5 * std::sqrt(2.0 / kCount));
}

TEST(DrawsTest, BelowReachesEveryValueEquallyOften) {
  int counts[7] = {};
  Draws draws(1, 1, 1);
  for (int i = 0; i < 70'000; ++i) ++counts[draws.Below(7)];
  for (int count : counts) EXPECT_NEAR(count, 10'000, 500);
}

class PermuteTest : public testing::TestWithParam<int64_t> {};

TEST_P(PermuteTest, IsABijection) {
  const int64_t size = GetParam();
  std::set<int64_t> seen;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t place = Permute(i, size, 42);
    ASSERT_GE(place, 0);
    ASSERT_LT(place, size);
    seen.insert(place);
  }
  EXPECT_EQ(static_cast<int64_t>(seen.size()), size);
}

INSTANTIATE_TEST_SUITE_P(Sizes, PermuteTest, testing::Values(1, 2, 3, 4, 5, 17, 64, 1000, 4097));

TEST(PermuteTest, DependsOnTheKeyAndLeavesFewInPlace) {
  int moved = 0, differs = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    moved += Permute(i, 1000, 1) != i;
    differs += Permute(i, 1000, 1) != Permute(i, 1000, 2);
  }
  EXPECT_GT(moved, 980);
  EXPECT_GT(differs, 980);
}

}  // namespace
}  // namespace emberd::demo
