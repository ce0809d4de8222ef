#include "preprocess/batch/sort_and_merge.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/testing/seed.h"
#include "tests/testing/random_case.h"

namespace emberd::preprocess {
namespace sort_and_merge_test {

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
        SortKeys(keys.data(), spare.data(), n, bits, low_bits);
        ASSERT_EQ(keys, expected) << n << " " << bits;
      }
    }
  }
}

// Would catch: bits of a small key that fall off, and those above it that come in.
TEST(SortKeysTest, SortsSmallKeysLikeTheStandardLibrary) {
  Random random(TestSeed(2));
  for (int64_t n : {0, 1, 47, 48, 1000, 1024, 20000}) {
    for (int low_bits : {0, 1, 10, 16, 32}) {
      std::vector<uint32_t> keys(n);
      for (int64_t i = 0; i < n; ++i) {
        const uint64_t upper = low_bits == 32 ? 0 : (random() & 0xffffffff) >> low_bits;
        const uint64_t ascending = i * ((uint64_t{1} << low_bits) - 1) / n;
        keys[i] = static_cast<uint32_t>(upper << low_bits | ascending);
      }
      std::vector<uint32_t> expected = keys, spare(n);
      std::sort(expected.begin(), expected.end());
      SortKeys(keys.data(), spare.data(), n, 32 - low_bits, low_bits);
      ASSERT_EQ(keys, expected) << n << " " << low_bits;
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

// Features of several tables, in any order, some of one table, and with few ids or many: enough
// for groups of keys of their own, of 32 bits or more.
class TablesTest : public ::testing::Test {
 protected:
  void MakeTables(v1::Combiner combiner) {
    shape_ = {};
    shape_.partitions = int64_t{1} << random_() % 4;
    std::vector<FeatureShape> tables;
    const size_t count = 1 + random_() % 6;
    for (size_t t = 0; t < count; ++t) {
      tables.push_back({.row_offset = t == 0 ? 0 : shape_.rows_per_partition,
                        .rotation = static_cast<int64_t>(random_() % shape_.partitions),
                        .combiner = combiner});
      // Keys of the largest tables do not fit into 32 bits.
      const int64_t most_rows = random_() % 3 == 0 ? 1 << 25 : 5000;
      rows_[tables.back().row_offset] = 1 + random_() % most_rows;
      shape_.rows_per_partition = tables.back().row_offset + rows_[tables.back().row_offset];
    }
    if (random_() % 2 == 0) tables.push_back(tables[random_() % count]);
    if (random_() % 2 == 0) std::shuffle(tables.begin(), tables.end(), random_);
    shape_.features = tables;
  }

  void MakeIds(bool weights) {
    const size_t features = shape_.features.size();
    ids_.assign(features, {});
    weights_.assign(features, {});
    inputs_.assign(features, {});
    slot_ = {};
    for (size_t f = 0; f < features; ++f) {
      const int64_t bag = 1 + random_() % 3;
      const int64_t samples = random_() % 3 == 0 ? random_() % 10 : random_() % 2000;
      const int64_t rows = rows_[shape_.features[f].row_offset] * shape_.partitions;
      for (int64_t i = 0; i < samples * bag; ++i) {
        // Some come again and again, in one sample, too.
        const int64_t frequent[] = {0, rows / 2, rows - 1};
        ids_[f].push_back(random_() % 2 == 0 ? frequent[random_() % 3]
                                             : static_cast<int64_t>(random_() % rows));
        weights_[f].push_back(static_cast<float>(1 + random_() % 8));  // sums are exact
      }
      inputs_[f].ids = DenseInput{absl::MakeConstSpan(ids_[f]), bag, samples};
      inputs_[f].has_weights = weights;
      if (weights) inputs_[f].weights = weights_[f];
      if (samples == 0) continue;
      slot_.slices.push_back({static_cast<int>(f), 0, samples, slot_.samples});
      slot_.samples += static_cast<int32_t>(samples);
    }
  }

  // By partition, local row and sample of the slot: how often, and with which gain.
  using Entries = std::map<std::tuple<int64_t, int64_t, int32_t>, std::pair<int, float>>;
  Entries Expected(bool weights) const {
    Entries entries;
    for (const SlotSlice& slice : slot_.slices) {
      const FeatureShape& feature = shape_.features[slice.feature];
      const auto& ids = ids_[slice.feature];
      const auto bag = static_cast<int64_t>(ids.size()) / slice.count;
      for (size_t i = 0; i < ids.size(); ++i) {
        auto& [count, gain] =
            entries[{(ids[i] + feature.rotation) % shape_.partitions,
                     ids[i] / shape_.partitions + feature.row_offset,
                     slice.slot_begin + static_cast<int32_t>(static_cast<int64_t>(i) / bag)}];
        ++count;
        const bool mean = feature.combiner == v1::MEAN;
        gain += weights ? weights_[slice.feature][i] : mean ? 1.0f / static_cast<float>(bag) : 1;
      }
    }
    return entries;
  }

  std::vector<const FeatureInput*> inputs() const {
    std::vector<const FeatureInput*> all;
    for (const FeatureInput& input : inputs_) all.push_back(&input);
    return all;
  }

  // Sorts and merges the slot, and looks whether that gives what is expected, in its order.
  void ExpectMerged(bool weights) {
    SlotCsr csr;
    Buffer<int32_t> multiplicity;
    SortSlot(shape_, inputs(), slot_, GainKindOf(shape_, inputs()), &scratch_, &multiplicity, &csr);
    const Entries expected = Expected(weights);
    auto next = expected.begin();
    for (int p = 0; p < shape_.partitions; ++p) {
      std::set<int64_t> rows;
      for (int32_t i = csr.Begin(0, p); i < csr.End(0, p); ++i, ++next) {
        ASSERT_NE(next, expected.end());
        const std::tuple<int64_t, int64_t, int32_t> found(p, csr.embedding_ids.data()[i],
                                                          csr.sample_ids.data()[i]);
        ASSERT_EQ(found, next->first);
        ASSERT_EQ(multiplicity.data()[i], next->second.first);
        ASSERT_EQ(csr.gains.data()[i], next->second.second);
        rows.insert(std::get<1>(found));
      }
      ASSERT_EQ(csr.partition_unique.data()[p], static_cast<int64_t>(rows.size()));
      ASSERT_EQ(csr.partition_ids.data()[p], csr.End(0, p) - csr.Begin(0, p));
    }
    ASSERT_EQ(next, expected.end());
    ASSERT_EQ(csr.entries, static_cast<int64_t>(expected.size()));
  }

  Random random_{TestSeed(1)};
  SlotScratch scratch_;
  StackShape shape_;
  std::map<int64_t, int64_t> rows_;  // of a table in a partition, by its row_offset
  std::vector<std::vector<int64_t>> ids_;
  std::vector<std::vector<float>> weights_;
  std::vector<FeatureInput> inputs_;
  SlotLayout slot_;
};

// Would catch: keys sorted apart whose rows lie among one another, a row that is counted from
// another table's begin, rows of two tables taken for one.
TEST_F(TablesTest, AreMergedInTheOrderOfTheirRows) {
  for (int round = 0; round < TestCases(60); ++round) {
    SCOPED_TRACE(round);
    const bool weights = round % 3 == 1;
    MakeTables(round % 3 == 2 ? v1::MEAN : v1::SUM);
    MakeIds(weights);
    ExpectMerged(weights);
    if (HasFatalFailure()) return;
  }
}

// Would catch: the bit that a key of 32 bits has no room for.
TEST_F(TablesTest, AKeyOf32BitsKeepsThemAll) {
  for (const int64_t rows : {1 << 19, (1 << 19) + 1}) {
    shape_ = {};
    shape_.partitions = 8;
    shape_.rows_per_partition = rows;
    shape_.features = {{}};
    std::vector<int64_t>& ids = ids_.emplace_back();
    for (int sample = 0; sample < 1024; ++sample) {
      const int64_t any = static_cast<int64_t>(random_() % (rows * 8));
      ids.push_back(sample % 3 == 0 ? rows * 8 - 1 : sample % 3 == 1 ? 0 : any);
    }
    inputs_.resize(1);
    inputs_[0].ids = DenseInput{absl::MakeConstSpan(ids), 1, 1024};
    slot_.slices = {{0, 0, 1024, 0}};
    slot_.samples = 1024;
    ExpectMerged(/*weights=*/false);
    EXPECT_EQ(scratch_.occurrences.groups[0].narrow, rows == 1 << 19);
    ids_.clear();
  }
}

// Would catch: of two features, that whose table comes first is named, though it comes later.
TEST_F(TablesTest, TheFirstFeatureWithTooLargeWeightsIsNamed) {
  shape_.rows_per_partition = 20;
  shape_.features = {{.row_offset = 10, .combiner = v1::MEAN}, {.combiner = v1::MEAN}};
  const std::vector<int64_t> ids(8);
  const std::vector<float> weights(8, 3e38f);
  FeatureInput input;
  input.ids = DenseInput{absl::MakeConstSpan(ids), 2, 4};
  input.has_weights = true;
  input.weights = weights;
  inputs_ = {input, input};
  slot_.slices = {{0, 2, 2, 0}, {1, 0, 4, 2}};
  slot_.samples = 6;
  SlotScratch scratch;
  SlotCsr csr;
  SortSlot(shape_, inputs(), slot_, GainKindOf(shape_, inputs()), &scratch, nullptr, &csr);
  EXPECT_EQ(csr.overflow.feature, 0);
  EXPECT_EQ(csr.overflow.sample, 2);
}

}  // namespace sort_and_merge_test
}  // namespace emberd::preprocess
