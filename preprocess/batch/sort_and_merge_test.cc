#include "preprocess/batch/sort_and_merge.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "base/testing/seed.h"
#include "tests/testing/random_case.h"

namespace emberd::preprocess {
namespace {

// Would catch: a lost or doubled key, an unstable pass, a pass left out that was needed.
TEST(SortKeysTest, SortsLikeTheStandardLibrary) {
  Random random(TestSeed(1));
  for (int64_t n : {0, 1, 2, 191, 192, 193, 1000, 5000, 70000}) {
    for (int bits : {0, 1, 5, 8, 11, 12, 20, 22, 23, 27, 31, 32, 33, 41}) {
      const int low_bits = std::min(32, 64 - bits);
      for (bool narrow : {false, true}) {
        std::vector<uint64_t> keys(n);
        for (int64_t i = 0; i < n; ++i) {
          uint64_t upper = bits == 0 ? 0 : random() >> (64 - bits);
          if (narrow) upper &= 0x10f0f0f0f0u;  // leaves whole digits equal
          keys[i] = upper << low_bits | static_cast<uint64_t>(i);
        }
        std::vector<uint64_t> expected = keys, spare(n);
        std::sort(expected.begin(), expected.end());
        const uint64_t* sorted = SortKeys(keys.data(), spare.data(), n, bits, low_bits);
        ASSERT_TRUE(std::equal(expected.begin(), expected.end(), sorted)) << n << " " << bits;
      }
    }
  }
}

// Would catch: a partition or a row that loses its upper bits when both need more than 32.
TEST(SortSlotTest, FindsRowsOfTheLargestStack) {
  StackShape shape;
  shape.partitions = 1024;
  shape.rows_per_partition = (int64_t{1} << 31) - 8;
  shape.features = {{.row_offset = 0, .rotation = 5}};
  EXPECT_EQ(shape.partition_bits() + shape.row_bits(), kMaxLiveBits);
  Random random(TestSeed(1));
  std::vector<int64_t> ids;
  for (int i = 0; i < 5000; ++i) {
    ids.push_back(static_cast<int64_t>(random() % (shape.rows_per_partition * shape.partitions)));
  }
  for (const bool weights : {false, true}) {
    const std::vector<float> gains(weights ? ids.size() : 0, 2);
    FeatureInput input;
    input.ids = DenseInput{absl::MakeConstSpan(ids), 1, static_cast<int64_t>(ids.size())};
    input.has_weights = weights;
    input.weights = gains;
    const FeatureInput* const inputs[] = {&input};
    SlotLayout slot;
    slot.slices = {{0, 0, static_cast<int64_t>(ids.size()), 0}};
    slot.samples = static_cast<int32_t>(ids.size());
    SlotScratch scratch;
    SlotCsr csr;
    SortSlot(shape, inputs, slot, GainKindOf(shape, inputs), &scratch, nullptr, &csr);
    int64_t found = 0;
    for (int p = 0; p < 1024; ++p) {
      for (int32_t i = csr.Begin(0, p); i < csr.End(0, p); ++i, ++found) {
        const int64_t id = ids[csr.sample_ids.data()[i]];
        EXPECT_EQ(p, (id + 5) % 1024);
        EXPECT_EQ(csr.embedding_ids.data()[i], id / 1024);
        EXPECT_EQ(csr.gains.data()[i], weights ? 2 : 1);
      }
    }
    EXPECT_EQ(found, static_cast<int64_t>(ids.size()));
  }
}

}  // namespace
}  // namespace emberd::preprocess
