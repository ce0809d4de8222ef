#include <algorithm>
#include <random>
#include <set>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing/sanitized.h"
#include "shard/batch/batch.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace row_order_test {

using ::testing::ElementsAre;
using testing::TestBatch;
using testing::TestShape;

using Shape = std::tuple<int, int64_t, int>;  // partitions, rows per partition, samples

class RowOrderTest : public ::testing::TestWithParam<Shape> {};

// Prevents a sort that is not stable, or that forgets high digits of the row: a row's gradients
// would be summed in another order, or in two pieces.
TEST_P(RowOrderTest, OrdersByRowAndSample) {
  std::mt19937_64 random(TestSeed());
  const auto [partitions, rows, samples] = GetParam();
  const testing::TestShape shape{partitions, rows, samples};
  std::vector<testing::TestEntry> entries = testing::RandomEntries(shape, 5, random);
  testing::TestBatch batch(entries, shape, 0, partitions, 2, 1);
  BufferPool pool;
  CpuPool cpu(1);
  const StackEntries stack = *ArrangeEntries(batch.view(), {partitions, rows}, pool, cpu);
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

// Catches a merge that loses or doubles a touch, or that puts a row's samples in another order than
// sorting does.
class MergeTouchesTest : public ::testing::TestWithParam<int> {  // slots
 protected:
  StackEntries Arrange(const TestBatch& batch, const StackShape& shape) {
    auto stack = ArrangeEntries(const_cast<TestBatch&>(batch).view(), shape, pool_, cpu_);
    EXPECT_TRUE(stack.ok()) << stack.status();
    return *std::move(stack);
  }
  // Whether there are touches, which must be those that sorting gives.
  bool Ordered(const StackEntries& stack, int partitions, int64_t rows) {
    if (stack.touches.empty()) return false;
    EXPECT_EQ(stack.touches.size(), static_cast<size_t>(partitions));
    for (int k = 0; k < partitions; ++k) {
      const PooledArray<Touch> sorted = OrderByRow({&stack}, k, rows, pool_);
      const PooledArray<Touch>& merged = stack.touches[k];
      if (stack.partition_entries[k] == 0) continue;
      EXPECT_EQ(merged.size(), sorted.size());
      for (size_t i = 0; i < sorted.size(); ++i) {
        EXPECT_EQ(std::tie(merged[i].row, merged[i].sample, merged[i].gain),
                  std::tie(sorted[i].row, sorted[i].sample, sorted[i].gain))
            << "partition " << k << ", touch " << i;
        if (HasFailure()) return true;
      }
    }
    return true;
  }

  BufferPool pool_;
  CpuPool cpu_{2};
};

TEST_P(MergeTouchesTest, GivesWhatSortingGives) {
  std::mt19937_64 random(TestSeed());
  constexpr int kPartitions = 2;
  for (const int64_t rows : {3, 50, 100'000}) {
    for (const int samples : {1, 500, 3000}) {
      const testing::TestShape shape{kPartitions, rows, samples};
      const TestBatch batch(testing::RandomEntries(shape, 5, random), shape, 0, kPartitions,
                            GetParam(), 1);
      StackShape wanted{kPartitions, rows};
      const StackEntries without = Arrange(batch, wanted);
      EXPECT_TRUE(without.touches.empty()) << "nobody asked";
      wanted.orders_touches = true;
      const StackEntries with = Arrange(batch, wanted);
      EXPECT_EQ(Ordered(with, kPartitions, rows), samples > 1) << "few are not worth it";
      if (samples == 1) continue;
      EXPECT_GE(with.bytes() - without.bytes(),
                with.entry_count * static_cast<int64_t>(sizeof(Touch)));
    }
  }
}

TEST_P(MergeTouchesTest, MiniBatchesAreLeftToSorting) {
  std::mt19937_64 random(TestSeed());
  const testing::TestShape shape{2, 50, 3000};
  const TestBatch batch(testing::RandomEntries(shape, 5, random), shape, 0, 2, GetParam(), 2);
  EXPECT_FALSE(Ordered(
      Arrange(batch, {.partitions = 2, .rows_per_partition = 50, .orders_touches = true}), 2, 50));
}

// What comes over the wire may be in any order, and may name a row of a sample twice.
TEST_P(MergeTouchesTest, RunsInAnyOrderAreLeftToSorting) {
  std::mt19937_64 random(TestSeed());
  const testing::TestShape shape{2, 50, 1000};
  int ordered = 0;
  for (int round = 0; round < 40; ++round) {
    TestBatch batch(testing::RandomEntries(shape, 5, random), shape, 0, 2, GetParam(), 1);
    auto& segment = batch.segments()[random() % batch.segments().size()];
    const size_t i = random() % (segment.row_ends[0] - segment.base - 1);
    if (round % 2 == 0) {
      std::swap(segment.samples[i], segment.samples[i + 1]);
      std::swap(segment.rows[i], segment.rows[i + 1]);
    } else {
      segment.samples[i] = segment.samples[i + 1];
      segment.rows[i] = segment.rows[i + 1];
    }
    batch.Refresh();
    ordered +=
        Ordered(Arrange(batch, {.partitions = 2, .rows_per_partition = 50, .orders_touches = true}),
                2, 50)
            ? 1
            : 0;
  }
  EXPECT_EQ(ordered, 20) << "those with a row twice";
}

INSTANTIATE_TEST_SUITE_P(Slots, MergeTouchesTest, ::testing::Values(1, 2, 3, 4, 7));

// The samples of one rank, feature by feature, each with some distinct rows.
StackEntries RankEntries(const std::vector<std::vector<std::vector<uint32_t>>>& features,
                         BufferPool& pool) {
  std::vector<Entry> entries;
  std::vector<int32_t> present;
  std::vector<uint32_t> offsets = {0};
  StackEntries part;
  part.feature_offsets = {0};
  int32_t sample = 0;
  for (const auto& samples : features) {
    for (const auto& rows : samples) {
      for (const uint32_t row : rows) entries.push_back({row, static_cast<float>(entries.size())});
      if (!rows.empty()) {
        present.push_back(sample);
        offsets.push_back(static_cast<uint32_t>(entries.size()));
      }
      ++sample;
    }
    part.feature_offsets.push_back(static_cast<uint32_t>(present.size()));
  }
  part.entry_count = static_cast<int64_t>(entries.size());
  const auto pooled = [&](const auto& from, auto& to) {
    to = std::decay_t<decltype(to)>(pool, from.size());
    std::copy(from.begin(), from.end(), to.data());
  };
  pooled(present, part.samples);
  pooled(offsets, part.offsets);
  pooled(entries, part.entries);
  return part;
}

// Features whose tables lie one behind the other, in another order, or are one table: each has its
// rows in [begin, begin + count). Would catch features that are sorted apart though their rows lie
// among one another, or whose order is taken for that of their tables.
TEST(RowOrderOfFeaturesTest, OrdersTablesInAnyOrder) {
  std::mt19937_64 random(TestSeed());
  BufferPool pool;
  constexpr int kPartitions = 2, kRows = 6000;
  for (int round = 0; round < Rounds(60); ++round) {
    std::vector<std::pair<int, int>> ranges;
    for (int begin = 0; begin < kRows; begin += ranges.back().second) {
      const int most = random() % 2 == 0 ? 2 : 3000;
      ranges.emplace_back(begin, std::min<int>(kRows - begin, 1 + random() % most));
    }
    if (round % 3 > 0) {  // one behind itself or anywhere behind
      const size_t again = random() % ranges.size();
      const size_t behind = random() % 2 == 0 ? again + 1 : ranges.size();
      ranges.insert(ranges.begin() + behind, ranges[again]);
    }
    if (round % 3 == 2) std::shuffle(ranges.begin(), ranges.end(), random);
    std::vector<StackEntries> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      std::vector<std::vector<std::vector<uint32_t>>> features;
      for (const auto& [begin, count] : ranges) {
        auto& samples = features.emplace_back(random() % 2 == 0 ? random() % 20 : random() % 900);
        for (auto& rows : samples) {
          std::set<uint32_t> distinct;
          for (uint64_t i = random() % 4; i > 0; --i) {
            distinct.insert(random() % kPartitions * kRows + begin + random() % count);
          }
          rows.assign(distinct.begin(), distinct.end());
        }
      }
      StackEntries& part = ranks.emplace_back(RankEntries(features, pool));
      part.partition_entries.resize(kPartitions);
      for (const Entry& entry : absl::Span<const Entry>(part.entries)) {
        ++part.partition_entries[entry.row / kRows];
      }
    }
    const std::vector<const StackEntries*> parts = {&ranks[0], &ranks[1]};
    for (int k = 0; k < kPartitions; ++k) {
      std::vector<Touch> expected;
      for (size_t f = 0; f < ranges.size(); ++f) {
        uint32_t first = 0;
        for (const StackEntries& part : ranks) {
          for (uint32_t i = part.feature_offsets[f]; i < part.feature_offsets[f + 1]; ++i) {
            for (uint32_t j = part.offsets[i]; j < part.offsets[i + 1]; ++j) {
              const Entry& entry = part.entries[j];
              if (entry.row / kRows != static_cast<uint32_t>(k)) continue;
              expected.push_back({entry.row - k * kRows, first + i, entry.gain});
            }
          }
          first += static_cast<uint32_t>(part.samples.size());
        }
      }
      std::stable_sort(expected.begin(), expected.end(),
                       [](const Touch& a, const Touch& b) { return a.row < b.row; });
      const PooledArray<Touch> found = OrderByRow(parts, k, kRows, pool);
      ASSERT_EQ(found.size(), expected.size() + kTouchPadding);
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(std::tie(found[i].row, found[i].sample, found[i].gain),
                  std::tie(expected[i].row, expected[i].sample, expected[i].gain))
            << "round " << round << ", touch " << i;
      }
    }
  }
}

// Catches a shard and a coordinator that would disagree on which row is which: rows missing, twice
// or out of order, or a group whose rank names another row, on batches as preprocessing makes them
// and as anybody may send them.

class DistinctRowsTest : public ::testing::Test {
 protected:
  // Compares with a set; `rows_per_partition` as in the batch.
  void Check(const preprocess::StackBatchView& view, int partitions, int64_t rows_per_partition) {
    const auto runs = RunTable::Make(view, partitions);
    ASSERT_TRUE(runs.ok()) << runs.status();
    std::vector<int64_t> groups(runs->size());
    std::set<uint32_t> expected;
    std::vector<uint64_t> expected_ends;
    for (int k = 0; k < partitions; ++k) {
      for (int slot = 0; slot < view.slots; ++slot) {
        for (int m = 0; m < view.minibatches; ++m) {
          const auto& run = runs->at(slot, k, m);
          groups[runs->index(slot, k, m)] = CountGroups(run);
          for (int64_t i = 0; i < run.size; ++i)
            expected.insert(static_cast<uint32_t>(k * rows_per_partition + run.rows[i]));
        }
      }
      expected_ends.push_back(expected.size());
    }
    const DistinctRows found = FindDistinctRows(*runs, groups, rows_per_partition, pool_, cpu_);
    EXPECT_THAT(absl::Span<const uint32_t>(found.rows), ::testing::ElementsAreArray(expected));
    EXPECT_EQ(found.partition_ends, expected_ends);
    CheckRanks(*runs, rows_per_partition, found);
    least_ = LeastDistinctRows(*runs, groups);
    distinct_ = static_cast<int64_t>(expected.size());
  }

  void CheckRanks(const RunTable& runs, int64_t rows_per_partition, const DistinctRows& found) {
    for (int slot = 0; slot < runs.slots(); ++slot) {
      for (int k = 0; k < runs.partitions(); ++k) {
        for (int m = 0; m < runs.minibatches(); ++m) {
          const auto& run = runs.at(slot, k, m);
          int64_t group = found.first_group[runs.index(slot, k, m)] - 1;
          for (int64_t i = 0; i < run.size; ++i) {
            group += i == 0 || run.rows[i] != run.rows[i - 1];
            ASSERT_EQ(found.rows[found.ranks[group]], k * rows_per_partition + run.rows[i]);
          }
        }
      }
    }
  }

  BufferPool pool_;
  CpuPool cpu_{2};
  int64_t least_ = 0;
  int64_t distinct_ = 0;
};

TEST_F(DistinctRowsTest, FindsEachRowOfRandomBatchesOnce) {
  std::mt19937_64 random(TestSeed());
  for (int i = 0; i < 60; ++i) {
    const int partitions = 1 << random() % 4;
    const TestShape shape{partitions, static_cast<int64_t>(8 + random() % 60), 40};
    const int minibatches = 1 + random() % 5;
    TestBatch batch(testing::RandomEntries(shape, 1 + random() % 6, random), shape, 0, partitions,
                    1 << random() % 4, minibatches);
    Check(batch.view(), partitions, shape.rows_per_partition);
    EXPECT_LE(least_, distinct_);
  }
}

TEST_F(DistinctRowsTest, MergesRowsOutOfOrder) {
  std::mt19937_64 random(TestSeed());
  const TestShape shape{2, 30, 50};
  for (int i = 0; i < 20; ++i) {
    TestBatch batch(testing::RandomEntries(shape, 5, random), shape, 0, 2, 2, 3);
    for (TestBatch::Segment& segment : batch.segments()) {
      const int32_t base = segment.base;
      std::shuffle(segment.rows.begin(), segment.rows.begin() + (segment.row_ends[0] - base),
                   random);
    }
    Check(batch.view(), 2, shape.rows_per_partition);
  }
}

TEST_F(DistinctRowsTest, CountsTheLastRowsOfTheLargestStack) {
  constexpr int64_t kRows = int64_t{1} << 31;  // per partition; two of them fill 32 bits
  const std::vector<int32_t> row_ends = {2, 9};
  const std::vector<int32_t> rows = {0, 2147483646, 0, 0, 0, 0, 0, 0, 2147483646};
  const std::vector<int32_t> samples = {0, 1, 0, 0, 0, 0, 0, 0, 2};
  const std::vector<float> gains(9, 1);
  const std::vector<preprocess::SampleSpan> span = {{0, 0, 3}};
  preprocess::StackBatchView view;
  view.sample_count = 3;
  view.slots = view.minibatches = 1;
  view.segments.push_back({0, row_ends, rows, samples, gains});
  view.spans.push_back(span);
  Check(view, 2, kRows);
}

TEST_F(DistinctRowsTest, AnEmptyBatchHasNone) {
  const TestShape shape{2, 16, 6};
  TestBatch batch({}, shape, 0, 2, 2, 1);
  Check(batch.view(), 2, 16);
  EXPECT_EQ(distinct_, 0);
  EXPECT_EQ(least_, 0);
}

}  // namespace row_order_test
}  // namespace emberd::shard
