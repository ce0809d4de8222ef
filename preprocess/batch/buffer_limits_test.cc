#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "preprocess/batch/preprocessor.h"

namespace emberd::preprocess {
namespace buffer_limits_test {

// A slot of one mini-batch with these entries in its partitions.
SlotCsr Slot(const std::vector<int>& entries) {
  SlotCsr csr;
  csr.Reserve(64, 1, static_cast<int>(entries.size()));
  csr.minibatches = 1;
  int64_t begin = 0;
  for (size_t p = 0; p < entries.size(); ++p) {
    csr.row_ends.data()[p] = static_cast<int32_t>(begin + entries[p]);
    csr.entries += entries[p];
    begin = AlignCsr(begin + entries[p]);
  }
  csr.cells = begin;
  return csr;
}

class BufferLimitsTest : public ::testing::Test {
 protected:
  BufferLimitsTest() {
    plan_.stacks.emplace_back().name = "users";
    stacks_.emplace_back().slots.push_back(Slot({10, 5}));  // cells 0 to 15, 16 to 23
    stacks_[0].slots.push_back(Slot({1, 9}));               // 24 to 31, 32 to 47
  }
  // Of eight samples.
  absl::Status Fit(int64_t capacity, bool drop) {
    plan_.stacks[0].samples = 8;
    return FitBuffers({{.ids_per_sample = capacity / 8}}, drop, plan_, &stacks_);
  }
  // Entries of partition p of slot s.
  int64_t Entries(int s, int p) const {
    return stacks_[0].slots[s].End(0, p) - stacks_[0].slots[s].Begin(0, p);
  }

  Plan plan_;
  std::vector<StackBatch> stacks_;
};

TEST_F(BufferLimitsTest, WhatFitsStays) {
  EXPECT_TRUE(Fit(48, false).ok());
  EXPECT_TRUE(Fit(48, true).ok());
  EXPECT_EQ(Entries(1, 1), 9);
  EXPECT_EQ(stacks_[0].slots[1].dropped, 0);
}

TEST_F(BufferLimitsTest, WhatDoesNotFitIsNamed) {
  EXPECT_EQ(Fit(24, false).message(),
            "stack 'users' needs 48 cells of its buffer of ids, whose capacity is 24 "
            "(max_ids_per_chip_per_sample 3 x 8 samples); ids that do not fit: 10. Raise "
            "max_ids_per_chip_per_sample to 6, set allow_id_dropping, or send fewer ids");
  EXPECT_EQ(Entries(1, 1), 9);  // nothing has changed
}

// Would catch: room for fewer samples than the batch has, or than the plan says, so that the pads
// of a small batch do not fit.
TEST_F(BufferLimitsTest, TheCapacityGrowsWithTheSamples) {
  EXPECT_FALSE(Fit(40, false).ok());
  EXPECT_EQ(stacks_[0].ids_per_sample, 6);
  stacks_[0].samples = 10;
  EXPECT_TRUE(Fit(40, false).ok());
  EXPECT_EQ(stacks_[0].ids_per_sample, 5);
}

TEST_F(BufferLimitsTest, WhatLiesBehindTheEndIsDroppedAndCounted) {
  ASSERT_TRUE(Fit(40, true).ok());
  EXPECT_EQ(Entries(1, 0), 1);
  EXPECT_EQ(Entries(1, 1), 8);
  EXPECT_EQ(stacks_[0].slots[1].dropped, 1);
  EXPECT_EQ(stacks_[0].slots[1].cells, 16);
  ASSERT_TRUE(Fit(8, true).ok());
  EXPECT_EQ(Entries(0, 0), 8);
  EXPECT_EQ(Entries(0, 1), 0);
  EXPECT_EQ(stacks_[0].slots[0].dropped, 7);
  EXPECT_EQ(Entries(1, 0) + Entries(1, 1), 0);
  EXPECT_EQ(stacks_[0].slots[1].dropped, 10);
  EXPECT_EQ(stacks_[0].slots[0].cells + stacks_[0].slots[1].cells, 8);
}

TEST_F(BufferLimitsTest, TooManyMinibatchesAreRefused) {
  stacks_[0].slots[0].minibatches = 3;
  EXPECT_EQ(FitBuffers({{.minibatches = 2}}, /*drop=*/true, plan_, &stacks_).message(),
            "stack 'users': the batch makes 3 mini-batches; max_minibatches_per_sparsecore is 2. "
            "Raise it or the limits of ids per partition, or send fewer ids");
  EXPECT_TRUE(FitBuffers({{.minibatches = 3}}, false, plan_, &stacks_).ok());
}

}  // namespace buffer_limits_test
}  // namespace emberd::preprocess
