#include <gtest/gtest.h>

#include "preprocess/batch/sort_and_merge.h"

namespace emberd::preprocess {
namespace sample_layout_test {

using Slices = std::vector<std::vector<int64_t>>;

Slices SlicesOf(const SlotLayout& slot) {
  Slices slices;
  for (const SlotSlice& s : slot.slices) {
    slices.push_back({s.feature, s.sample_begin, s.count, s.slot_begin});
  }
  return slices;
}

TEST(SampleLayoutTest, SplitThenStackFillsUpEveryFeature) {
  std::vector<SlotLayout> layout;
  LayOutSamples(v1::SPLIT_THEN_STACK, {5, 0, 2}, 4, &layout);
  ASSERT_EQ(layout.size(), 4u);
  for (const SlotLayout& slot : layout) EXPECT_EQ(slot.samples, 3);  // ceil(5/4) + 0 + ceil(2/4)
  EXPECT_EQ(SlicesOf(layout[0]), (Slices{{0, 0, 2, 0}, {2, 0, 1, 2}}));
  EXPECT_EQ(SlicesOf(layout[1]), (Slices{{0, 2, 2, 0}, {2, 1, 1, 2}}));
  EXPECT_EQ(SlicesOf(layout[2]), (Slices{{0, 4, 1, 0}}));
  EXPECT_EQ(SlicesOf(layout[3]), (Slices{}));
}

TEST(SampleLayoutTest, StackThenSplitFillsUpTheStack) {
  std::vector<SlotLayout> layout;
  LayOutSamples(v1::STACK_THEN_SPLIT, {3, 4}, 2, &layout);
  ASSERT_EQ(layout.size(), 2u);
  EXPECT_EQ(layout[0].samples, 4);
  EXPECT_EQ(SlicesOf(layout[0]), (Slices{{0, 0, 3, 0}, {1, 0, 1, 3}}));
  EXPECT_EQ(SlicesOf(layout[1]), (Slices{{1, 1, 3, 0}}));
}

TEST(SampleLayoutTest, NoSamplesNoSlices) {
  std::vector<SlotLayout> layout;
  for (auto kind : {v1::SPLIT_THEN_STACK, v1::STACK_THEN_SPLIT}) {
    LayOutSamples(kind, {0, 0}, 2, &layout);
    for (const SlotLayout& slot : layout) {
      EXPECT_EQ(slot.samples, 0);
      EXPECT_TRUE(slot.slices.empty());
    }
  }
}

}  // namespace sample_layout_test
}  // namespace emberd::preprocess
