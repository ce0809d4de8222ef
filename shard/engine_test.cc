// The engine as the server sees it, against plain loops that must agree bit by bit.
#include "shard/engine.h"

#include <cstring>
#include <future>
#include <memory>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "shard/testing/reference.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace engine_test {

using testing::RandomEntries;
using testing::Row;
using testing::TestBatch;
using testing::TestEngine;
using testing::TestEntry;
using testing::TestShape;

v1::OptimizerConfig Sgd(float learning_rate) {
  v1::OptimizerConfig optimizer;
  optimizer.set_learning_rate(learning_rate);
  optimizer.mutable_sgd();
  return optimizer;
}

v1::OptimizerConfig Adagrad(float learning_rate) {
  v1::OptimizerConfig optimizer;
  optimizer.set_learning_rate(learning_rate);
  optimizer.mutable_adagrad()->set_initial_accumulator(0.1f);
  return optimizer;
}

bool SameBits(const Row& a, const float* b) {
  return std::memcmp(a.data(), b, a.size() * sizeof(float)) == 0;
}

struct Cut {
  int partitions, first, count, slots, minibatches, width, columns;
};

class EngineTest : public ::testing::TestWithParam<Cut> {};

// Prevents: an order of summation that depends on slots, mini-batches or partitions per shard; a
// fused multiply-add; a sample or row that is skipped, doubled or shifted; padding columns that
// pick up values.
TEST_P(EngineTest, StepEqualsPlainLoops) {
  const Cut cut = GetParam();
  std::mt19937_64 random(TestSeed());
  const TestShape shape{cut.partitions, 40, 60};
  TestEngine engine({OneTableStack(shape, cut.width, cut.columns, Adagrad(0.25f))}, shape,
                    cut.first, cut.count);

  for (int step = 0; step < 3; ++step) {
    const std::vector<TestEntry> entries = RandomEntries(shape, 4, random);
    TestBatch test_batch(entries, shape, cut.first, cut.count, cut.slots, cut.minibatches);
    const auto batch = engine.Prepare(test_batch.view());
    ASSERT_TRUE(batch.ok()) << batch.status();
    const auto row_of = [&](int partition, int row) {
      return engine.ReadRow(0, partition, row, cut.width);
    };
    const std::vector<StackSums> sums = engine.Gather(*batch);
    const std::map<int, Row> expected =
        testing::ReferenceGather(entries, cut.first, cut.count, cut.width, row_of);
    ASSERT_EQ(sums.size(), 1u);
    ASSERT_EQ(sums[0].samples.size(), expected.size());
    size_t i = 0;
    for (const auto& [sample, row] : expected) {
      EXPECT_EQ(sums[0].samples[i], sample);
      EXPECT_TRUE(SameBits(row, sums[0].sums.data() + i * cut.width)) << "sample " << sample;
      ++i;
    }

    std::map<int, Row> gradients;
    std::vector<float> packed;
    std::normal_distribution<float> normal;
    for (const int32_t sample : sums[0].samples) {
      Row& row = gradients[sample];
      row.resize(cut.width);
      for (int c = 0; c < cut.columns; ++c) row[c] = normal(random);
      packed.insert(packed.end(), row.begin(), row.end());
    }
    const testing::TableRows summed = testing::ReferenceGradients(
        entries, cut.first, cut.count, cut.width, [&](int sample) { return gradients.at(sample); });
    testing::TableRows weights, accumulators;
    for (const auto& [key, g] : summed) {
      weights[key] = row_of(key.first, key.second);
      accumulators[key] = engine.ReadRow(0, key.first, key.second, cut.width, "accumulator");
      for (int c = 0; c < cut.columns; ++c) {
        float& a = accumulators[key][c];
        a = a + g[c] * g[c];
        weights[key][c] = weights[key][c] - 0.25f * g[c] / std::sqrt(a);
      }
    }
    ApplyInput input;
    input.stacks.push_back({0, packed, {}});
    EXPECT_EQ(engine.Apply(*batch, input), static_cast<int64_t>(summed.size()));
    for (const auto& [key, row] : weights) {
      EXPECT_TRUE(SameBits(row, row_of(key.first, key.second).data()))
          << key.first << "," << key.second;
      EXPECT_TRUE(
          SameBits(accumulators[key],
                   engine.ReadRow(0, key.first, key.second, cut.width, "accumulator").data()));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cuts, EngineTest,
                         ::testing::Values(Cut{1, 0, 1, 1, 1, 8, 8}, Cut{1, 0, 1, 3, 1, 16, 13},
                                           Cut{2, 0, 2, 2, 1, 64, 64}, Cut{4, 2, 2, 2, 1, 24, 20},
                                           Cut{8, 0, 8, 4, 1, 128, 128}, Cut{8, 4, 4, 2, 3, 40, 33},
                                           Cut{4, 0, 4, 1, 5, 200, 200}));

// Prevents: stored bits read as another type, quantization after the gain or of what is stored, a
// clamp or rounding that differs between the vector code and the formula.
TEST(Engine, GatherReadsEveryStorageTypeAndQuantizes) {
  std::mt19937_64 random(TestSeed());
  for (const int width : {8, 24, 32, 64, 136}) {
    for (const v1::DataType dtype : {v1::FLOAT32, v1::BFLOAT16, v1::FLOAT16}) {
      for (const bool quantized : {false, true}) {
        const TestShape shape{2, 40, 30};
        StackSpec stack = OneTableStack(shape, width, width, Sgd(1));
        stack.storage_dtype = dtype;
        stack.quantized = quantized;
        stack.quantization.set_lower(-0.6f);
        stack.quantization.set_upper(0.7f);
        stack.quantization.set_num_buckets(100);
        TestEngine engine({stack}, shape, 0, 2);
        const std::vector<TestEntry> entries = RandomEntries(shape, 5, random);
        TestBatch batch(entries, shape, 0, 2, 2, 1);
        const StackSums sums = engine.Gather(*engine.Prepare(batch.view()))[0];
        const auto row_of = [&](int partition, int row) {
          Row values = engine.ReadRow(0, partition, row, width);
          for (float& x : values) x = quantized ? testing::Quantize(x, -0.6f, 0.7f, 100) : x;
          return values;
        };
        size_t i = 0;
        for (const auto& [sample, row] : testing::ReferenceGather(entries, 0, 2, width, row_of)) {
          ASSERT_EQ(sums.samples[i], sample);
          ASSERT_TRUE(SameBits(row, sums.sums.data() + i++ * width))
              << "width " << width << " " << v1::DataType_Name(dtype) << " " << quantized;
        }
      }
    }
  }
}

TEST(Engine, MissingGradientIsZeroAndStillUpdates) {
  const TestShape shape{1, 16, 4};
  v1::OptimizerConfig optimizer = Sgd(0.5f);
  optimizer.set_weight_decay_factor(0.5f);
  TestEngine engine({OneTableStack(shape, 8, 8, optimizer)}, shape, 0, 1);
  TestBatch test_batch({{0, 0, 3, 1.0f}}, shape, 0, 1, 1, 1);
  const Row before = engine.ReadRow(0, 0, 3, 8), other = engine.ReadRow(0, 0, 4, 8);
  EXPECT_EQ(engine.Apply(*engine.Prepare(test_batch.view()), {}), 1);
  const Row after = engine.ReadRow(0, 0, 3, 8);
  for (int c = 0; c < 8; ++c) EXPECT_EQ(after[c], before[c] * 0.5f);
  EXPECT_EQ(engine.ReadRow(0, 0, 4, 8), other);
}

// Prevents: a row that is updated without its initial value, since those of another rank have
// theirs.
TEST(Engine, RowsOfOneRankMayHaveNoValuesYet) {
  const TestShape shape{1, 4096, 4};
  v1::OptimizerConfig optimizer = Sgd(0.5f);
  optimizer.set_weight_decay_factor(0.5f);
  const StackSpec stack = OneTableStack(shape, 16, 16, optimizer);
  const Row before = TestEngine({stack}, shape, 0, 1).ReadRow(0, 0, 4000, 16);
  for (const bool touched_first : {false, true}) {
    TestEngine engine({stack}, shape, 0, 1, {.eager_bytes = 0});
    TestBatch of_one({{0, 0, 5, 1.0f}}, shape, 0, 1, 1, 1);
    TestBatch of_other({{0, 0, 4000, 1.0f}}, shape, 0, 1, 1, 1);
    engine.Gather(*engine.Prepare(of_one.view()));
    const auto touched = *engine.Prepare(of_one.view());
    const auto untouched = *engine.Prepare(of_other.view());
    EXPECT_EQ(engine.ApplyParts({{touched_first ? touched : untouched, {}},
                                 {touched_first ? untouched : touched, {}}}),
              2);
    const Row after = engine.ReadRow(0, 0, 4000, 16);
    for (int c = 0; c < 16; ++c) EXPECT_EQ(after[c], before[c] * 0.5f);
  }
}

// Prevents: rows that are counted for another stack, or twice where ranks share them.
TEST(Engine, UpdatesCountRowsByStack) {
  const TestShape shape{2, 16, 4};
  std::vector<StackSpec> stacks(2, OneTableStack(shape, 8, 8, Sgd(0.5f)));
  stacks[1].name = "other";
  stacks[1].tables[0].name = "another";
  TestEngine engine(stacks, shape, 0, 2);
  TestBatch first({{0, 0, 3, 1}, {1, 0, 3, 1}, {2, 1, 5, 1}}, shape, 0, 2, 1, 1);
  TestBatch second({{0, 1, 7, 1}}, shape, 0, 2, 1, 1, 2, /*stack=*/1);
  const auto batch =
      engine.engine().PrepareBatch(engine.spec().model_id, {first.view(), second.view()}, nullptr);
  ASSERT_TRUE(batch.ok()) << batch.status();
  const ApplyResult result =
      engine.ApplyForResult({{*batch, ApplyInput()}, {*batch, ApplyInput()}});
  EXPECT_EQ(result.rows_updated, 3);
  ASSERT_EQ(result.stacks.size(), 2u);
  EXPECT_EQ(result.stacks[0].stack, 0);
  EXPECT_EQ(result.stacks[0].rows_updated, 2);
  EXPECT_EQ(result.stacks[1].stack, 1);
  EXPECT_EQ(result.stacks[1].rows_updated, 1);
  const EngineStatistics statistics = engine.engine().Statistics();
  EXPECT_EQ(statistics.partitions[0].rows_updated, 1);
  EXPECT_EQ(statistics.partitions[1].rows_updated, 2);
}

TEST(Engine, HyperparametersHoldForOneStep) {
  const TestShape shape{1, 16, 4};
  TestEngine engine({OneTableStack(shape, 8, 8, Sgd(1))}, shape, 0, 1);
  TestBatch test_batch({{0, 0, 3, 1.0f}}, shape, 0, 1, 1, 1);
  const auto batch = *engine.Prepare(test_batch.view());
  const std::vector<float> gradient(8, 1.0f);
  const float before = engine.ReadRow(0, 0, 3, 1)[0];
  ApplyInput input;
  input.stacks.push_back({0, gradient, {{"learning_rate", 0.25f}}});
  engine.Apply(batch, input);
  EXPECT_EQ(engine.ReadRow(0, 0, 3, 1)[0], before - 0.25f);
  input.stacks[0].hyperparameters.clear();
  engine.Apply(batch, input);
  EXPECT_EQ(engine.ReadRow(0, 0, 3, 1)[0], before - 0.25f - 1);
}

// Both bounds pass the configured other one: catches a check after each value of a hash map, whose
// order is by chance, so that a shard could refuse at the update what it had accepted before.
TEST(Engine, ClipBoundsMoveTogether) {
  const TestShape shape{1, 16, 4};
  v1::OptimizerConfig sgd = Sgd(1);
  sgd.set_clip_gradient_min(-1);
  sgd.set_clip_gradient_max(1);
  TestEngine engine({OneTableStack(shape, 8, 8, sgd)}, shape, 0, 1);
  TestBatch test_batch({{0, 0, 3, 1.0f}}, shape, 0, 1, 1, 1);
  const auto batch = *engine.Prepare(test_batch.view());
  const std::vector<float> gradient(8, 0.0f), weights(8, 0.0f);
  for (const float shift : {2.0f, -2.0f}) {
    ASSERT_TRUE(engine.Assign({engine.spec().model_id, 0, "", {0}, {3}, 8}, weights).ok());
    ApplyInput input;
    const double near = shift * 0.75, far = shift * 1.25;  // the gradient is clipped to `near`
    input.stacks.push_back(
        {0,
         gradient,
         {{"clip_gradient_min", std::min(near, far)}, {"clip_gradient_max", std::max(near, far)}}});
    engine.Apply(batch, input);
    EXPECT_EQ(engine.ReadRow(0, 0, 3, 1)[0], -shift * 0.75f);
  }
}

// Catches a rate that is rounded to float32 on its way: 1 - 0.999f is not 0.001.
TEST(Engine, ADecayRateSentPerStepGivesTheBitsOfAConfiguredOne) {
  const TestShape shape{1, 16, 4};
  std::vector<std::vector<float>> velocities;
  for (const double configured : {0.999, 0.5}) {
    v1::OptimizerConfig adam = Sgd(0.1f);
    adam.mutable_adam()->set_beta1(0.9);
    adam.mutable_adam()->set_beta2(configured);
    adam.mutable_adam()->set_epsilon(1e-7f);
    TestEngine engine({OneTableStack(shape, 8, 8, adam)}, shape, 0, 1);
    TestBatch test_batch({{0, 0, 3, 1.0f}}, shape, 0, 1, 1, 1);
    const std::vector<float> gradient(8, 1.0f);
    ApplyInput input;
    input.stacks.push_back({0, gradient, {}});
    if (configured != 0.999) input.stacks[0].hyperparameters = {{"beta2", 0.999}};
    engine.Apply(*engine.Prepare(test_batch.view()), input);
    velocities.push_back(engine.ReadRow(0, 0, 3, 8, "velocity"));
  }
  EXPECT_EQ(velocities[0], std::vector<float>(8, 0.001f));
  EXPECT_EQ(velocities[1], velocities[0]);
}

TEST(Engine, BadInputIsRefused) {
  const TestShape shape{1, 16, 4};
  TestEngine engine({OneTableStack(shape, 8, 8, Sgd(1))}, shape, 0, 1);
  TestBatch test_batch({{0, 0, 3, 1.0f}, {2, 0, 3, 1.0f}}, shape, 0, 1, 1, 1);
  const auto batch = *engine.Prepare(test_batch.view());
  std::vector<float> gradient(16, 1.0f);
  ApplyInput input;
  input.stacks.push_back({0, gradient, {}});
  EXPECT_TRUE(testing::Check(batch, input).ok());
  gradient[9] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(testing::Check(batch, input).message(),
            "gradients of stack stack: value nan of sample 2, column 1 must be finite");
  gradient[9] = -std::numeric_limits<float>::infinity();
  EXPECT_FALSE(testing::Check(batch, input).ok());
  gradient[9] = 0;
  input.stacks[0].gradients = absl::MakeSpan(gradient).first(8);
  EXPECT_FALSE(testing::Check(batch, input).ok());
  input.stacks[0].gradients = gradient;
  input.stacks[0].hyperparameters = {{"momentum", 0.5f}};
  EXPECT_FALSE(testing::Check(batch, input).ok());
  input.stacks[0].hyperparameters.clear();
  input.stacks.push_back(input.stacks[0]);
  EXPECT_FALSE(testing::Check(batch, input).ok());
  input.stacks[1].stack = 1;
  EXPECT_FALSE(testing::Check(batch, input).ok());
}

TEST(Engine, RowsAreReadAndAssigned) {
  const TestShape shape{4, 16, 4};
  TestEngine engine({OneTableStack(shape, 16, 10, Adagrad(1))}, shape, 2, 2);
  const std::vector<int32_t> partitions = {3, 2, 3};
  const std::vector<int64_t> rows = {5, 0, 15};
  std::vector<float> values(30);
  for (size_t i = 0; i < values.size(); ++i) values[i] = 0.5f * i;
  RowSelection selection{7, 0, "", partitions, rows, 10};
  ASSERT_TRUE(engine.Assign(selection, values).ok());
  std::vector<float> read(30);
  ASSERT_TRUE(engine.Read(selection, absl::MakeSpan(read)).ok());
  EXPECT_EQ(read, values);
  EXPECT_EQ(engine.ReadRow(0, 3, 5, 16),
            (Row{0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 0, 0, 0, 0, 0, 0}));
  selection.slot = "accumulator";
  ASSERT_TRUE(engine.Read(selection, absl::MakeSpan(read)).ok());
  EXPECT_EQ(read, std::vector<float>(30, 0.1f));

  const auto refused = [&](const RowSelection& bad) {
    return !engine.Read(bad, absl::MakeSpan(read)).ok() && !engine.Assign(bad, values).ok();
  };
  EXPECT_TRUE(refused({8, 0, "", partitions, rows, 10}));
  EXPECT_TRUE(refused({7, 1, "", partitions, rows, 10}));
  EXPECT_TRUE(refused({7, 0, "nothing", partitions, rows, 10}));
  EXPECT_TRUE(refused({7, 0, "", partitions, rows, 9}));
  EXPECT_TRUE(refused({7, 0, "", partitions, absl::MakeSpan(rows).first(2), 10}));
  EXPECT_TRUE(refused({7, 0, "", std::vector<int32_t>{1, 2, 3}, rows, 10}));
  // UndefinedBehaviorSanitizer would find a difference to the first partition that overflows.
  EXPECT_TRUE(refused({7, 0, "", std::vector<int32_t>{2, INT32_MIN, 3}, rows, 10}));
  EXPECT_TRUE(refused({7, 0, "", partitions, std::vector<int64_t>{0, 16, 0}, 10}));
  EXPECT_TRUE(refused({7, 0, "", partitions, std::vector<int64_t>{0, -1, 0}, 10}));
  // Padding columns cannot be written, and values must be finite.
  values.resize(33);
  EXPECT_FALSE(engine.Assign({7, 0, "", partitions, rows, 11}, values).ok());
  values.resize(30);
  values[7] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(engine.Assign({7, 0, "", partitions, rows, 10}, values).ok());
}

// A model that takes 64 * 2 * 32 * 4 bytes of each partition.
ModelSpec OfAllMemory() {
  ModelSpec spec;
  spec.model_id = 1;
  spec.partitions = spec.partition_count = 2;
  spec.stacks = {testing::OneTableStack({2, 64, 4}, 32, 32, Adagrad(1))};
  return spec;
}

TEST(Engine, BudgetIsCheckedAndReturned) {
  CpuPool cpu(1);
  auto engine = *Engine::Create({.cpu = &cpu, .bytes_per_partition = 64 * 2 * 32 * 4});
  ModelSpec spec = OfAllMemory();
  EXPECT_TRUE(engine->CreateModel(spec).ok());
  EXPECT_EQ(engine->CreateModel(spec).code(), absl::StatusCode::kAlreadyExists);
  spec.model_id = 2;
  const absl::Status full = engine->CreateModel(spec);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()),
              ::testing::HasSubstr("needs 16384 bytes in every partition"));
  EXPECT_EQ(engine->Statistics().table_bytes, 2 * 16384);
  EXPECT_TRUE(engine->DropModel(1).ok());
  EXPECT_EQ(engine->DropModel(1).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(engine->CreateModel(spec).ok());
}

// As for a reset: whoever reads the old rows then gives their memory back a moment later.
TEST(Engine, ANewModelWaitsForTheMemoryOfADroppedOne) {
  CpuPool cpu(1);
  auto engine = *Engine::Create({.cpu = &cpu, .bytes_per_partition = 64 * 2 * 32 * 4});
  ModelSpec spec = OfAllMemory();
  ASSERT_TRUE(engine->CreateModel(spec).ok());
  std::shared_ptr<Snapshot> reader = *engine->MakeSnapshot({spec.model_id}, {});
  ASSERT_TRUE(engine->DropModel(1).ok());
  std::thread ends([&] {
    absl::SleepFor(absl::Milliseconds(50));
    engine->EndSnapshot(reader, /*kept=*/false);
    reader = nullptr;
  });
  spec.model_id = 2;
  const absl::Status made = engine->CreateModel(spec);
  ends.join();
  EXPECT_TRUE(made.ok()) << made;
}

TEST(Engine, BatchOfADroppedModelIsRefused) {
  const TestShape shape{1, 16, 4};
  TestEngine engine({OneTableStack(shape, 8, 8, Sgd(1))}, shape, 0, 1);
  TestBatch test_batch({{0, 0, 3, 1.0f}}, shape, 0, 1, 1, 1);
  const auto batch = *engine.Prepare(test_batch.view());
  ASSERT_TRUE(engine.engine().DropModel(7).ok());
  EXPECT_EQ(testing::Check(batch, {}).code(), absl::StatusCode::kNotFound);
  absl::Status gathered;
  engine.engine().Gather(batch, {},
                         [&](absl::StatusOr<GatherOutput> sums) { gathered = sums.status(); });
  EXPECT_EQ(gathered.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(engine.Prepare(test_batch.view()).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace engine_test
}  // namespace emberd::shard
