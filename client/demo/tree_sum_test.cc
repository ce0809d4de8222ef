#include "client/demo/tree_sum.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace emberd::demo {
namespace {

using Parts = std::vector<std::vector<float>>;

TEST(SumByTreeTest, AddsNeighboursFirst) {
  // From left to right the ones would be lost beside 1e8, one by one.
  EXPECT_THAT(SumByTree(Parts{{1e8f}, {0}, {4}, {4}}), testing::ElementsAre(1e8f + 8));
  EXPECT_THAT(SumByTree(Parts{{1e8f}, {4}, {4}, {0}}), testing::ElementsAre(1e8f));
}

TEST(SumByTreeTest, SumsOfHalvesGiveTheWhole) {
  Parts parts;
  for (int i = 0; i < 8; ++i) parts.push_back({1.0f / static_cast<float>(3 + i * i), 0.1f});
  for (size_t size = 4; size <= 8; ++size) {  // the last half may be short
    const Parts left(parts.begin(), parts.begin() + 4);
    const Parts right(parts.begin() + 4, parts.begin() + static_cast<ptrdiff_t>(size));
    EXPECT_EQ(SumByTree(Parts(parts.begin(), parts.begin() + static_cast<ptrdiff_t>(size))),
              SumByTree(Parts{SumByTree(left), SumByTree(right)}))
        << size;
  }
}

TEST(SumByTreeTest, LeavesOutWhatIsEmpty) {
  EXPECT_THAT(SumByTree(Parts{}), testing::IsEmpty());
  EXPECT_THAT(SumByTree(Parts{{}, {}}), testing::IsEmpty());
  EXPECT_THAT(SumByTree(Parts{{}, {2}, {3}, {}}), testing::ElementsAre(5));
}

}  // namespace
}  // namespace emberd::demo
