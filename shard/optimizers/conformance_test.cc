// What holds for every optimizer and every storage type, through the engine.
// Covers: shard/update/update_kernel.cc
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/optimizers.h"
#include "shard/store/stack_store.h"
#include "shard/testing/optimizer_cases.h"
#include "shard/testing/reference.h"
#include "shard/testing/scalar_optimizers.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace conformance_test {

using testing::OptimizerCase;
using testing::RandomEntries;
using testing::Row;
using testing::RowValues;
using testing::TestBatch;
using testing::TestEngine;
using testing::TestEntry;
using testing::TestShape;

constexpr int kWidth = 40, kColumns = 35;
const TestShape kTwoPartitions{2, 24, 20};

class OptimizerConformanceTest
    : public ::testing::TestWithParam<std::tuple<OptimizerCase, v1::DataType>> {
 protected:
  void SetUp() override {
    optimizer_ = testing::CompleteOptimizer(std::get<0>(GetParam()).text);
    slots_ = config::OptimizerSlots(optimizer_);
    StackSpec stack = OneTableStack(kTwoPartitions, kWidth, kColumns, optimizer_);
    stack.storage_dtype = std::get<1>(GetParam());
    engine_ = std::make_unique<TestEngine>(std::vector<StackSpec>{stack}, kTwoPartitions, 0, 2);
  }

  // Live columns; checks that padding is 0.
  RowValues ReadAll(int partition, int row) {
    RowValues values;
    values.w = ReadLive(partition, row, "");
    for (const config::SlotInfo& slot : slots_) {
      values.slots.push_back(slot.one_per_row ? engine_->ReadRow(0, partition, row, 1, slot.name)
                                              : ReadLive(partition, row, slot.name));
    }
    return values;
  }

  Row ReadLive(int partition, int row, const std::string& slot) {
    Row values = engine_->ReadRow(0, partition, row, kWidth, slot);
    for (int c = kColumns; c < kWidth; ++c) EXPECT_EQ(values[c], 0) << "padding of " << slot;
    values.resize(kColumns);
    return values;
  }

  testing::TableRows Dump() {
    testing::TableRows dump;
    for (int partition = 0; partition < 2; ++partition) {
      for (int row = 0; row < kTwoPartitions.rows_per_partition; ++row) {
        const RowValues values = ReadAll(partition, row);
        Row& all = dump[{partition, row}] = values.w;
        for (const Row& slot : values.slots) all.insert(all.end(), slot.begin(), slot.end());
      }
    }
    return dump;
  }

  v1::OptimizerConfig optimizer_;
  std::vector<config::SlotInfo> slots_;
  std::unique_ptr<TestEngine> engine_;
};

// Prevents: a kernel that differs from the formula by one bit on this CPU; untouched rows that
// move; padding that picks up values; 16-bit weights rounded twice or cut.
TEST_P(OptimizerConformanceTest, EqualsScalarTwinBitByBit) {
  std::mt19937_64 random(TestSeed());
  std::normal_distribution<float> normal;
  for (int step = 0; step < 4; ++step) {
    const std::vector<TestEntry> entries = RandomEntries(kTwoPartitions, 2, random);
    TestBatch test_batch(entries, kTwoPartitions, 0, 2, 2, 1);
    const auto batch = *engine_->Prepare(test_batch.view());
    const std::vector<StackSums> sums = engine_->Gather(batch);
    std::map<int, Row> gradients;
    std::vector<float> packed;
    for (const int32_t sample : sums[0].samples) {
      Row row(kWidth);
      for (int c = 0; c < kColumns; ++c) row[c] = normal(random);
      packed.insert(packed.end(), row.begin(), row.end());
      gradients[sample] = row;
    }
    testing::TableRows expected = Dump();
    const StepRule rule = MakeStepRule(optimizer_, step);
    for (const auto& [key, g] : testing::ReferenceGradients(
             entries, 0, 2, kColumns, [&](int sample) { return gradients.at(sample); })) {
      RowValues row = ReadAll(key.first, key.second);
      testing::ScalarUpdate(rule, g, row);
      std::vector<char> stored(row.w.size() * sizeof(float));
      WriteStoredRow(std::get<1>(GetParam()), row.w, stored.data());
      ReadStoredRow(std::get<1>(GetParam()), stored.data(), absl::MakeSpan(row.w));
      Row& all = expected[key] = row.w;
      for (const Row& slot : row.slots) all.insert(all.end(), slot.begin(), slot.end());
    }
    ApplyInput input;
    input.stacks.push_back({0, packed, {}});
    input.step = step;
    engine_->Apply(batch, input);
    for (const auto& [key, row] : Dump()) {
      EXPECT_EQ(row, expected[key]) << "partition " << key.first << " row " << key.second;
    }
  }
}

TEST_P(OptimizerConformanceTest, MissingGradientEqualsZeroGradient) {
  TestBatch test_batch({{0, 0, 3, 1.5f}, {1, 1, 5, -1}}, kTwoPartitions, 0, 2, 1, 1);
  const auto batch = *engine_->Prepare(test_batch.view());
  const std::vector<float> some(2 * kWidth, 0.25f), zero(2 * kWidth, 0.0f);
  ApplyInput input;
  input.step = 0;
  input.stacks.push_back({0, some, {}});
  engine_->Apply(batch, input);
  const RowValues before = ReadAll(0, 3);
  input.step = 1;
  input.stacks[0].gradients = zero;
  engine_->Apply(batch, input);
  const testing::TableRows with_zero = Dump();
  for (size_t s = 0; s <= slots_.size(); ++s) {  // back to the moment before
    const std::string slot = s == 0 ? "" : slots_[s - 1].name;
    const Row& values = s == 0 ? before.w : before.slots[s - 1];
    const std::vector<int32_t> partition = {0};
    const std::vector<int64_t> row = {3};
    ASSERT_TRUE(
        engine_->Assign({7, 0, slot, partition, row, static_cast<int>(values.size())}, values)
            .ok());
  }
  input.stacks.clear();
  engine_->Apply(batch, input);
  EXPECT_EQ(Dump().at({0, 3}), with_zero.at({0, 3}));
}

TEST_P(OptimizerConformanceTest, StepIsRequiredExactlyWhereTheFormulaUsesIt) {
  TestBatch test_batch({{0, 0, 3, 1.5f}}, kTwoPartitions, 0, 2, 1, 1);
  const auto batch = *engine_->Prepare(test_batch.view());
  const absl::Status status = testing::Check(batch, {});
  EXPECT_EQ(status.ok(), !config::OptimizerNeedsStep(optimizer_)) << status;
  if (!status.ok()) {
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("step -1"));
  }
}

TEST_P(OptimizerConformanceTest, RefusesALearningRateItCannotDivideBy) {
  TestBatch test_batch({{0, 0, 3, 1.5f}}, kTwoPartitions, 0, 2, 1, 1);
  const auto batch = *engine_->Prepare(test_batch.view());
  // By 1e-40 the quotients are infinite.
  for (const double rate : {0.0, 1e-45, 1e-40, 3e-39}) {
    ApplyInput input;
    input.step = 0;
    input.stacks.push_back({0, {}, {{"learning_rate", rate}}});
    EXPECT_EQ(testing::Check(batch, input).ok(),
              !optimizer_.has_ftrl() || optimizer_.ftrl().multiply_linear_by_learning_rate())
        << rate;
  }
  // A log may have smaller ones than are taken now, and must be read.
  ApplyInput logged;
  logged.step = 0;
  logged.checked = true;
  logged.stacks.push_back({0, {}, {{"learning_rate", 1e-35}}});
  EXPECT_TRUE(testing::Check(batch, logged).ok());
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerConformanceTest,
                         ::testing::Combine(::testing::ValuesIn(testing::OptimizerCases()),
                                            ::testing::Values(v1::FLOAT32, v1::BFLOAT16,
                                                              v1::FLOAT16)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name +
                                  v1::DataType_Name(std::get<1>(info.param));
                         });

}  // namespace conformance_test
}  // namespace emberd::shard
