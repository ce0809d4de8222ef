// Prevents: a row that is counted for another table or named by another id than the trainer's; a
// sample that favours some places of a batch; shares that do not add up.
#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <type_traits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shard/store/model.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace hot_rows_test {

using testing::TestBatch;
using testing::TestEngine;
using testing::TestEntry;
using testing::TestShape;

// Would catch: a copy that finds its counters in what it was copied from.
static_assert(!std::is_copy_constructible_v<SpaceSaving>);

constexpr int kPartitions = 8;
constexpr int kFirst = 4;  // this shard has partitions 4 to 7
constexpr int kCount = 4;

// A stack of two tables with a gap between them: "a" on local rows 0 to 9, "b" on 16 to 31, rotated
// by three partitions.
ModelSpec TwoTables() {
  ModelSpec spec;
  spec.model_id = 7;
  spec.name = "model";
  spec.partitions = kPartitions;
  spec.first_partition = kFirst;
  spec.partition_count = kCount;
  const TestShape shape{kPartitions, 40, 4096};
  StackSpec stack = testing::OneTableStack(shape, 8, 8, [] {
    v1::OptimizerConfig sgd;
    sgd.set_learning_rate(0.5f);
    sgd.mutable_sgd();
    return sgd;
  }());
  stack.tables.clear();
  const auto add = [&](const char* name, int64_t first, int64_t rows, int rotation) {
    TableSpec& table = stack.tables.emplace_back();
    table.name = name;
    table.row_offset = first;
    table.vocabulary_size = table.padded_vocabulary_size = rows * kPartitions;
    table.embedding_dim = 8;
    table.shard_rotation = rotation;
  };
  add("a", 0, 10, 0);
  add("b", 16, 16, 3);
  spec.stacks.push_back(stack);
  return spec;
}

// Where a trainer's id lies: as model_spec.h says.
TestEntry EntryOf(const TableSpec& table, int64_t id, int sample) {
  const int64_t partition = (id + table.shard_rotation) % kPartitions;
  return {sample, static_cast<int32_t>(partition),
          static_cast<int32_t>(id / kPartitions + table.row_offset), 1.0f};
}

bool IsHere(const TestEntry& entry) {
  return entry.partition >= kFirst && entry.partition < kFirst + kCount;
}

// Entries in the order of a batch, as the shard counts rows.
StackEntries Arranged(const std::vector<TestEntry>& entries, BufferPool& pool) {
  StackEntries arranged;
  for (const TestEntry& entry : entries) arranged.entry_count += IsHere(entry);
  arranged.entries = PooledArray<Entry>(pool, arranged.entry_count);
  size_t i = 0;
  for (const TestEntry& entry : entries) {
    if (!IsHere(entry)) continue;
    arranged.entries[i++] = {static_cast<uint32_t>((entry.partition - kFirst) * 40 + entry.row), 1};
  }
  return arranged;
}

class HotRowsTest : public ::testing::Test {
 protected:
  HotRowsTest() : store_(*StackStore::Create(spec_, spec_.stacks[0], EngineOptions())) {}

  std::mt19937_64 random_{TestSeed()};
  BufferPool pool_;
  const ModelSpec spec_ = TwoTables();
  const std::unique_ptr<StackStore> store_;
};

TEST_F(HotRowsTest, CountsEveryEntryOfEveryTableWhenEachCounts) {
  HotRowSketches sketches(*store_, 1024, /*sampling=*/1);
  std::map<int64_t, int64_t> exact[2];
  for (int batch = 0; batch < 20; ++batch) {
    std::vector<TestEntry> entries;
    for (int i = 0; i < 500; ++i) {
      const int t = static_cast<int>(random_() % 2);
      const TableSpec& table = spec_.stacks[0].tables[t];
      const auto id = static_cast<int64_t>(random_() % table.vocabulary_size);
      entries.push_back(EntryOf(table, id, i));
      exact[t][id] += IsHere(entries.back());
    }
    sketches.Sample(Arranged(entries, pool_));
  }
  const std::vector<HotTable> tables = sketches.Top(1000);
  ASSERT_EQ(tables.size(), 2u);
  for (int t = 0; t < 2; ++t) {
    EXPECT_EQ(tables[t].table, spec_.stacks[0].tables[t].name);
    int64_t sum = 0;
    for (const HotRow& row : tables[t].rows) {
      EXPECT_EQ(row.lookups, exact[t][row.id]) << tables[t].table << " " << row.id;
      EXPECT_EQ(row.error, 0);
      sum += row.lookups;
    }
    EXPECT_EQ(sum, tables[t].lookups);
  }
}

// Batches of 256 entries, the same number as the sampling, in which one place always names the same
// row: a fixed distance would see it always or never.
TEST_F(HotRowsTest, NoPeriodOfTheBatchesHidesARow) {
  HotRowSketches sketches(*store_, 1024, /*sampling=*/256);
  const TableSpec& table = spec_.stacks[0].tables[0];
  constexpr int kBatches = 20'000;
  std::vector<TestEntry> entries;
  for (int i = 0; i < 256; ++i) entries.push_back(EntryOf(table, i % 64 == 7 ? 4 : 8 + 5, i));
  const StackEntries arranged = Arranged(entries, pool_);
  ASSERT_EQ(arranged.entry_count, 256);
  for (int batch = 0; batch < kBatches; ++batch) sketches.Sample(arranged);
  const HotTable top = sketches.Top(2)[0];
  ASSERT_EQ(top.rows.size(), 2u);
  EXPECT_EQ(top.rows[0].id, 13);
  EXPECT_EQ(top.rows[1].id, 4);
  // Of 20,000 that count, 1 in 64 are expected to name row 4: 312, give or take 18.
  EXPECT_NEAR(static_cast<double>(top.rows[1].lookups) / static_cast<double>(top.lookups), 1 / 64.0,
              5 * std::sqrt(1 / 64.0 / kBatches));
  EXPECT_NEAR(static_cast<double>(top.lookups), 256.0 * kBatches, 0.05 * 256 * kBatches);
}

TEST_F(HotRowsTest, TheSameGathersGiveTheSameRows) {
  HotRowSketches one(*store_, 128), two(*store_, 128);
  std::vector<TestEntry> entries;
  for (int i = 0; i < 3000; ++i) {
    entries.push_back(EntryOf(spec_.stacks[0].tables[1], static_cast<int64_t>(random_() % 128), i));
  }
  const StackEntries arranged = Arranged(entries, pool_);
  for (int batch = 0; batch < 50; ++batch) {
    one.Sample(arranged);
    two.Sample(arranged);
  }
  const HotTable a = one.Top(20)[1], b = two.Top(20)[1];
  ASSERT_EQ(a.rows.size(), 20u);
  for (size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(a.rows[i].id, b.rows[i].id);
    EXPECT_EQ(a.rows[i].lookups, b.rows[i].lookups);
  }
}

TEST(HotRowCounters, AreBoundedForAnyNumberOfTables) {
  EXPECT_EQ(HotRowCounters(1), 1024);
  EXPECT_EQ(HotRowCounters(128), 512);
  EXPECT_EQ(HotRowCounters(100'000), 128);
}

// Through the engine: half of all lookups go to one row of each table.
TEST(EngineHotRows, NamesTheRowsThatGathersRead) {
  const ModelSpec spec = TwoTables();
  TestEngine engine(spec);
  const TestShape shape{kPartitions, 40, 4096};
  const int64_t here[2] = {12, 25};  // on partitions 12 % 8 = 4 and (25 + 3) % 8 = 4
  const int64_t elsewhere = 21;      // on partition (21 + 3) % 8 = 0 of another shard
  std::vector<TestEntry> entries;
  for (int sample = 0; sample < shape.samples; ++sample) {
    for (int t = 0; t < 2; ++t) {
      const TableSpec& table = spec.stacks[0].tables[t];
      entries.push_back(EntryOf(table, here[t], sample));
      if (t == 1) entries.push_back(EntryOf(table, elsewhere, sample));
      const int64_t other = (here[t] + 1 + sample % 3) % table.vocabulary_size;
      entries.push_back(EntryOf(table, other, sample));
    }
  }
  TestBatch batch(entries, shape, kFirst, kCount, 2, 1);
  constexpr int kGathers = 50;
  for (int i = 0; i < kGathers; ++i) {
    const auto prepared = engine.Prepare(batch.view());
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    engine.GatherEither(*prepared);
  }
  const std::vector<HotTable> tables = engine.engine().HotRows(1);
  ASSERT_EQ(tables.size(), 2u);
  for (int t = 0; t < 2; ++t) {
    EXPECT_EQ(tables[t].model, "model");
    EXPECT_EQ(tables[t].table, spec.stacks[0].tables[t].name);
    ASSERT_EQ(tables[t].rows.size(), 1u);
    EXPECT_EQ(tables[t].rows[0].id, here[t]);
    EXPECT_NEAR(static_cast<double>(tables[t].lookups), 2.0 * kGathers * shape.samples,
                0.5 * kGathers * shape.samples);
  }

  const EngineStatistics statistics = engine.engine().Statistics();
  ASSERT_EQ(statistics.partitions.size(), size_t{kCount});
  int64_t gathered = 0;
  for (const PartitionStatistics& partition : statistics.partitions) {
    EXPECT_EQ(partition.table_bytes * kCount, statistics.table_bytes);
    gathered += partition.rows_gathered;
  }
  EXPECT_EQ(gathered, statistics.rows_gathered);
  EXPECT_EQ(gathered, kGathers * 4 * int64_t{shape.samples});
  EXPECT_EQ(statistics.queued, 0);
}

// Against exact counts. Prevents: an order that loses the smallest counter, so that a frequent key
// is thrown out; counts below the truth, or above it by more than the error that is admitted.

// Keys 0, 1, ... with probability in proportion to 1 / (1 + key)^exponent.
std::vector<uint32_t> ZipfKeys(int keys, double exponent, int count, std::mt19937_64& random) {
  std::vector<double> weights;
  for (int key = 0; key < keys; ++key) weights.push_back(std::pow(1 + key, -exponent));
  std::discrete_distribution<uint32_t> distribution(weights.begin(), weights.end());
  std::vector<uint32_t> drawn(count);
  for (uint32_t& key : drawn) key = distribution(random);
  return drawn;
}

struct Stream {
  int counters, keys;
  double exponent;
};

class SpaceSavingTest : public ::testing::TestWithParam<Stream> {};

TEST_P(SpaceSavingTest, CountsAreTooHighByAtMostTheirError) {
  const Stream stream = GetParam();
  std::mt19937_64 random(TestSeed());
  SpaceSaving sketch(stream.counters);
  std::map<uint32_t, int64_t> exact;
  int64_t total = 0;
  for (const uint32_t key : ZipfKeys(stream.keys, stream.exponent, 50'000, random)) {
    const int64_t weight = 1 + static_cast<int64_t>(random() % 7);
    sketch.Add(key, weight);
    exact[key] += weight;
    total += weight;
  }
  EXPECT_EQ(sketch.total(), total);
  const std::vector<SpaceSaving::Item> items = sketch.Top(stream.counters);
  EXPECT_EQ(items.size(), std::min<size_t>(stream.counters, exact.size()));
  int64_t sum = 0;
  std::map<uint32_t, int64_t> found;
  for (const SpaceSaving::Item& item : items) {
    EXPECT_LE(exact[item.key], item.count) << "key " << item.key;
    EXPECT_GE(exact[item.key], item.count - item.error) << "key " << item.key;
    EXPECT_LE(item.error, total / stream.counters);
    if (!found.empty()) {
      EXPECT_LE(item.count, sum) << "largest counts first";
    }
    EXPECT_TRUE(found.emplace(item.key, item.count).second) << "key " << item.key << " twice";
    sum = item.count;
  }
  for (const auto& [key, count] : exact) {
    if (count > total / stream.counters) {
      EXPECT_EQ(found.count(key), 1u) << "key " << key << " of " << count;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Streams, SpaceSavingTest,
                         ::testing::Values(Stream{1, 10, 1}, Stream{7, 1000, 0},
                                           Stream{100, 20'000, 1.05}, Stream{1024, 20'000, 0.8},
                                           Stream{1024, 500, 1.2}));

TEST(SpaceSaving, IsExactAsLongAsAllKeysHaveACounter) {
  std::mt19937_64 random(TestSeed());
  SpaceSaving sketch(300);
  std::map<uint32_t, int64_t> exact;
  for (const uint32_t key : ZipfKeys(300, 1.05, 20'000, random)) {
    sketch.Add(key, 1);
    ++exact[key];
  }
  for (const SpaceSaving::Item& item : sketch.Top(300)) {
    EXPECT_EQ(item.count, exact[item.key]);
    EXPECT_EQ(item.error, 0);
  }
}

TEST(SpaceSaving, TheHottestKeysOfAZipfStreamComeFirst) {
  std::mt19937_64 random(TestSeed());
  SpaceSaving sketch(1024);
  for (const uint32_t key : ZipfKeys(100'000, 1.2, 200'000, random)) sketch.Add(key, 1);
  const std::vector<SpaceSaving::Item> top = sketch.Top(5);
  ASSERT_EQ(top.size(), 5u);
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(top[i].key, i);  // the next ones are close together
}

TEST(SpaceSaving, TopOfNothingIsNothing) {
  SpaceSaving sketch(3);
  EXPECT_TRUE(sketch.Top(10).empty());
  sketch.Add(9, 1);
  EXPECT_TRUE(sketch.Top(0).empty());
  EXPECT_TRUE(sketch.Top(-1).empty());
  EXPECT_EQ(sketch.Top(10).size(), 1u);
}

}  // namespace hot_rows_test
}  // namespace emberd::shard
