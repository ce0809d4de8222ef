// Stacks that skip rows whose gradient is not finite. Prevents: one bad sample that poisons the
// rows it touches, or stops the training of all others; a row that is updated in half; a gradient
// clip that hides an infinity.
#include <limits>
#include <set>

#include <gtest/gtest.h>

#include "config/optimizers.h"
#include "shard/testing/optimizer_cases.h"
#include "shard/testing/reference.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace skip_row_test {

using testing::Row;
using testing::TestBatch;
using testing::TestEngine;
using testing::TestEntry;
using testing::TestShape;

constexpr int kWidth = 24, kColumns = 21, kPartitions = 2;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
const TestShape kShape{kPartitions, 24, 20};

class SkipRowTest : public ::testing::TestWithParam<testing::OptimizerCase> {
 protected:
  std::unique_ptr<TestEngine> MakeEngine(v1::DataType dtype) {
    StackSpec stack = testing::OneTableStack(kShape, kWidth, kColumns,
                                             testing::CompleteOptimizer(GetParam().text));
    stack.storage_dtype = dtype;
    stack.skip_nonfinite = true;
    stack.stochastic_rounding = dtype == v1::BFLOAT16;
    return std::make_unique<TestEngine>(std::vector<StackSpec>{stack}, kShape, 0, kPartitions);
  }

  // Weights and slots of a row.
  static Row ReadAll(TestEngine& engine, int partition, int row) {
    Row all = engine.ReadRow(0, partition, row, kWidth);
    for (const config::SlotInfo& slot : config::OptimizerSlots(engine.spec().stacks[0].optimizer)) {
      const Row values =
          engine.ReadRow(0, partition, row, slot.one_per_row ? 1 : kWidth, slot.name);
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }
};

TEST_P(SkipRowTest, LeavesExactlyTheRowsOfBadSamples) {
  std::mt19937_64 random(TestSeed());
  std::normal_distribution<float> normal;
  for (const v1::DataType dtype : {v1::FLOAT32, v1::BFLOAT16, v1::FLOAT16}) {
    const auto engine = MakeEngine(dtype), twin = MakeEngine(dtype);
    for (int step = 0; step < 4; ++step) {
      const std::vector<TestEntry> entries = testing::RandomEntries(kShape, 2, random);
      std::set<int> samples;
      for (const TestEntry& e : entries) samples.insert(e.sample);
      // The twin gets zeros where the engine gets a value that is not finite.
      std::set<int> bad;
      std::vector<float> gradients, zeroed;
      for (const int sample : samples) {
        Row row(kWidth);
        for (int c = 0; c < kColumns; ++c) row[c] = normal(random);
        zeroed.insert(zeroed.end(), row.begin(), row.end());
        if (random() % 6 == 0) {
          bad.insert(sample);
          const float values[] = {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity};
          row[random() % kColumns] = values[random() % 3];
        }
        gradients.insert(gradients.end(), row.begin(), row.end());
      }
      std::set<std::pair<int, int>> touched, untouchable;
      for (const TestEntry& e : entries) {
        touched.insert({e.partition, e.row});
        if (bad.count(e.sample) > 0) untouchable.insert({e.partition, e.row});
      }
      std::map<std::pair<int, int>, Row> before;
      for (const auto& key : untouchable) before[key] = ReadAll(*engine, key.first, key.second);

      TestBatch batch(entries, kShape, 0, kPartitions, 2, 1);
      ApplyInput input;
      input.step = step;
      input.stacks.push_back({0, gradients, {}});
      const ApplyResult result = engine->ApplyForResult({{*engine->Prepare(batch.view()), input}});
      EXPECT_EQ(result.rows_skipped, static_cast<int64_t>(untouchable.size()));
      EXPECT_EQ(result.rows_updated, static_cast<int64_t>(touched.size() - untouchable.size()));
      input.stacks[0].gradients = zeroed;
      EXPECT_EQ(twin->ApplyForResult({{*twin->Prepare(batch.view()), input}}).rows_skipped, 0);
      for (const auto& [partition, row] : touched) {
        const Row after = ReadAll(*engine, partition, row);
        if (untouchable.count({partition, row}) > 0) {
          EXPECT_EQ(after, (before[{partition, row}]));
          // Back to one state, for the next step.
          const std::vector<int32_t> partitions = {partition};
          const std::vector<int64_t> rows = {row};
          size_t at = 0;
          const auto copy = [&](const std::string& slot, int width) {
            const int columns = std::min(width, kColumns);
            const Row values(after.begin() + at, after.begin() + at + columns);
            ASSERT_TRUE(twin->Assign({7, 0, slot, partitions, rows, columns}, values).ok());
            at += width;
          };
          copy("", kWidth);
          for (const auto& slot : config::OptimizerSlots(engine->spec().stacks[0].optimizer))
            copy(slot.name, slot.one_per_row ? 1 : kWidth);
        } else {
          EXPECT_EQ(after, ReadAll(*twin, partition, row));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, SkipRowTest, ::testing::ValuesIn(testing::OptimizerCases()),
                         [](const auto& info) { return info.param.name; });

TEST(SkipRow, CountsSumsThatOverflowOverRanks) {
  StackSpec stack = testing::OneTableStack(
      kShape, kWidth, kColumns,
      testing::CompleteOptimizer("sgd {} clip_gradient_min: -1 clip_gradient_max: 1"));
  stack.skip_nonfinite = true;
  TestEngine engine({stack}, kShape, 0, kPartitions);
  TestBatch batch({{0, 0, 3, 1.0f}, {1, 1, 4, 1.0f}}, kShape, 0, kPartitions, 1, 1);
  std::vector<float> gradients(2 * kWidth, 0.5f);
  gradients[5] = 3e38f;  // finite in each rank, and not in the sum; a clip would make it 1
  testing::RankInput part{*engine.Prepare(batch.view()), {}};
  part.input.stacks.push_back({0, gradients, {}});
  const Row before = engine.ReadRow(0, 0, 3, kWidth), other = engine.ReadRow(0, 1, 4, kWidth);
  const ApplyResult result = engine.ApplyForResult({part, part});
  EXPECT_EQ(result.rows_updated, 1);
  EXPECT_EQ(result.rows_skipped, 1);
  EXPECT_EQ(engine.ReadRow(0, 0, 3, kWidth), before);
  EXPECT_NE(engine.ReadRow(0, 1, 4, kWidth), other);
}

}  // namespace skip_row_test
}  // namespace emberd::shard
