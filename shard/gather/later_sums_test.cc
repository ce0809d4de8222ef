// A shard may return partial sums or unique rows; that must never change a bit, and AUTO must send
// fewer bytes. Catches: ranks that name another row, partitions that are folded in another order,
// quantization before or after the wrong step, stored bits read as another type, a row that was not
// initialised before it was copied, a sum that is rounded before it is whole.
// Covers: pooling.cc
#include <cstring>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shard/gather/pooling.h"
#include "shard/gather/tensor_kernels.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace later_sums_test {

using ::testing::HasSubstr;
using testing::OneTableStack;
using testing::TestBatch;
using testing::TestEngine;
using testing::TestShape;

v1::OptimizerConfig Sgd() {
  v1::OptimizerConfig optimizer;
  optimizer.mutable_sgd();
  return optimizer;
}

StackSpec RandomStack(const TestShape& shape, std::mt19937_64& random) {
  const int width = 8 * static_cast<int>(1 + random() % 20);
  StackSpec stack = OneTableStack(shape, width, width - static_cast<int>(random() % 8), Sgd());
  constexpr v1::DataType kStorage[] = {v1::FLOAT32, v1::BFLOAT16, v1::FLOAT16};
  stack.storage_dtype = kStorage[random() % 3];
  stack.quantized = random() % 2 == 0;
  stack.quantization.set_lower(-0.5f);
  stack.quantization.set_upper(0.75f);
  stack.quantization.set_num_buckets(100);
  return stack;
}

void ExpectSameBits(const StackSums& a, const StackSums& b) {
  EXPECT_EQ(a.stack, b.stack);
  EXPECT_EQ(a.rows_gathered, b.rows_gathered);
  ASSERT_EQ(a.samples, b.samples);
  ASSERT_EQ(a.sums.size(), b.sums.size());
  EXPECT_EQ(std::memcmp(a.sums.data(), b.sums.data(), a.sums.size() * sizeof(float)), 0);
}

class LaterSumsTest : public ::testing::Test {
 protected:
  // All sums, made some at a time.
  absl::StatusOr<StackSums> Pool(const preprocess::StackBatchView& view, const StackSpec& spec,
                                 int partitions, absl::Span<const char> rows) {
    const auto later = LaterSums::Make(view, spec, partitions, {rows}, pool_, cpu_);
    if (!later.ok()) return later.status();
    const absl::Span<const int32_t> samples = (*later)->samples();
    const auto sums =
        std::make_shared<PooledArray<float>>(pool_, samples.size() * spec.embedding_dim);
    constexpr int64_t kAtOnce = 16;  // of any width, these begin at a multiple of 64 bytes
    const auto count = static_cast<int64_t>(samples.size());
    for (int64_t i = 0; i < count; i += kAtOnce) {
      (*later)->Sum(i, std::min(count, i + kAtOnce), sums->data() + i * spec.embedding_dim);
    }
    StackSums result;
    result.stack = view.stack;
    result.samples = samples;
    result.sums = *sums;
    result.owner = sums;
    result.later = *later;  // has the samples
    result.rows_gathered = (*later)->entries().entry_count;
    return result;
  }

  CpuPool cpu_{2};
  BufferPool pool_;
};

TEST_F(LaterSumsTest, EveryModeGivesTheSameBitsAndAutoTheFewestBytes) {
  std::mt19937_64 random(TestSeed());
  int unique = 0, sums = 0;
  for (int i = 0; i < 60; ++i) {
    const int all_partitions = 1 << random() % 4;
    const int partitions = std::max(1, all_partitions >> random() % 3);
    const int first = partitions * static_cast<int>(random() % (all_partitions / partitions));
    const TestShape shape{all_partitions, static_cast<int64_t>(8 + 8 * (random() % 20)),
                          static_cast<int>(1 + random() % 200)};
    const StackSpec stack = RandomStack(shape, random);
    TestBatch batch(testing::RandomEntries(shape, 1 + static_cast<int>(random() % 6), random),
                    shape, first, partitions, 1 << random() % 4, 1 + random() % 4);
    std::map<v1::ResultMode, GatherOutput> output;
    for (const v1::ResultMode mode : {v1::PARTIAL_SUMS, v1::UNIQUE_ROWS, v1::AUTO}) {
      StackSpec with_mode = stack;
      with_mode.result_mode = mode;
      TestEngine engine({with_mode}, shape, first, partitions,
                        EngineOptions{.eager_bytes = i % 2 == 0 ? 0 : 1 << 20});
      output[mode] = engine.GatherEither(*engine.Prepare(batch.view()));
    }
    ASSERT_EQ(output[v1::PARTIAL_SUMS].sums.size(), 1u);
    ASSERT_EQ(output[v1::UNIQUE_ROWS].rows.size(), 1u);
    const StackSums& expected = output[v1::PARTIAL_SUMS].sums[0];
    const StackRows& rows = output[v1::UNIQUE_ROWS].rows[0];
    const auto pooled = Pool(batch.view(), stack, partitions, rows.rows);
    ASSERT_TRUE(pooled.ok()) << pooled.status();
    ExpectSameBits(*pooled, expected);

    const GatherOutput& chosen = output[v1::AUTO];
    ASSERT_EQ(chosen.rows.size() + chosen.sums.size(), 1u);
    // By the formulas of model.proto.
    EXPECT_EQ(chosen.rows.size(), rows.bytes() < expected.bytes());
    unique += static_cast<int>(chosen.rows.size());
    sums += static_cast<int>(chosen.sums.size());
    if (!chosen.rows.empty()) {
      EXPECT_EQ(chosen.rows[0].rows, rows.rows);
    } else {
      ExpectSameBits(chosen.sums[0], expected);
    }
  }
  EXPECT_GT(unique, 5);
  EXPECT_GT(sums, 5);
}

// A hundred samples that look up one row on each of two partitions: 2 rows against 100 sums.
TEST_F(LaterSumsTest, RepeatedRowsTravelOnce) {
  const TestShape shape{2, 16, 100};
  std::vector<testing::TestEntry> entries;
  for (int sample = 0; sample < 100; ++sample) {
    entries.push_back({sample, 0, 3, 1.0f});
    entries.push_back({sample, 1, 5, 0.5f});
  }
  StackSpec stack = OneTableStack(shape, 16, 16, Sgd());
  stack.result_mode = v1::AUTO;
  TestEngine engine({stack}, shape, 0, 2);
  TestBatch batch(entries, shape, 0, 2, 2, 1);
  const GatherOutput output = engine.GatherEither(*engine.Prepare(batch.view()));
  ASSERT_EQ(output.rows.size(), 1u);
  EXPECT_EQ(output.rows[0].bytes(), 2 * 64);
  EXPECT_EQ(output.rows[0].row_bytes, 64);
  EXPECT_EQ(output.rows[0].rows_gathered, 200);
  const auto pooled = Pool(batch.view(), stack, 2, output.rows[0].rows);
  ASSERT_TRUE(pooled.ok()) << pooled.status();
  const std::vector<float> a = engine.ReadRow(0, 0, 3, 16), b = engine.ReadRow(0, 1, 5, 16);
  ASSERT_EQ(pooled->samples.size(), 100u);
  for (int c = 0; c < 16; ++c) EXPECT_EQ(pooled->sums[99 * 16 + c], a[c] + 0.5f * b[c]);
}

TEST_F(LaterSumsTest, LargeBatchesToo) {
  std::mt19937_64 random(TestSeed());
  const TestShape shape{1, 64, 30'000};
  StackSpec stack = OneTableStack(shape, 128, 128, Sgd());
  TestBatch batch(testing::RandomEntries(shape, 2, random), shape, 0, 1, 4, 1);
  TestEngine sums({stack}, shape, 0, 1);
  stack.result_mode = v1::UNIQUE_ROWS;
  TestEngine rows({stack}, shape, 0, 1);
  const StackRows unique = rows.GatherEither(*rows.Prepare(batch.view())).rows[0];
  const auto pooled = Pool(batch.view(), stack, 1, unique.rows);
  ASSERT_TRUE(pooled.ok()) << pooled.status();
  ExpectSameBits(*pooled, sums.Gather(*sums.Prepare(batch.view()))[0]);
}

// One entry a sample, of few rows.
std::vector<testing::TestEntry> SingleEntries(const TestShape& shape, std::mt19937_64& random) {
  std::vector<testing::TestEntry> entries;
  for (int sample = 0; sample < shape.samples; ++sample) {
    if (random() % 8 == 0) continue;
    entries.push_back({sample, static_cast<int>(random() % shape.partitions),
                       static_cast<int32_t>(random() % 5), 1.0f});
  }
  return entries;
}

TEST_F(LaterSumsTest, SingleRowsAreTheSumsAndMayBeRounded) {
  std::mt19937_64 random(TestSeed());
  for (const v1::ResultMode mode : {v1::UNIQUE_ROWS, v1::AUTO}) {
    const TestShape shape{2, 16, 200};
    StackSpec stack = OneTableStack(shape, 24, 20, Sgd());
    TestBatch batch(SingleEntries(shape, random), shape, 0, 2, 2, 1);
    preprocess::StackBatchView view = batch.view();
    view.single_rows = true;
    TestEngine sums_engine({stack}, shape, 0, 2);
    const StackSums sums = sums_engine.Gather(*sums_engine.Prepare(view))[0];
    stack.result_mode = mode;
    TestEngine engine({stack}, shape, 0, 2);
    for (const v1::DataType dtype : {v1::FLOAT32, v1::BFLOAT16}) {
      const GatherOutput output = engine.GatherEither(*engine.Prepare(view, dtype));
      ASSERT_EQ(output.rows.size(), 1u);
      const StackRows& rows = output.rows[0];
      EXPECT_EQ(rows.rounded, dtype == v1::BFLOAT16);
      EXPECT_EQ(rows.row_bytes, rows.rounded ? 48 : 96);
      const auto later = LaterSums::Make(view, stack, 2, {rows.rows, rows.rounded}, pool_, cpu_);
      ASSERT_TRUE(later.ok()) << later.status();
      ASSERT_TRUE((*later)->single_rows());
      EXPECT_EQ((*later)->row_dtype(), dtype);
      ASSERT_EQ((*later)->samples(), sums.samples);
      for (size_t i = 0; i < sums.samples.size(); ++i) {
        const float* const sum = sums.sums.data() + i * 24;
        std::string expected(reinterpret_cast<const char*>(sum), 96);
        if (rows.rounded) RoundToBfloat16(sum, 24, expected.data());
        ASSERT_EQ(std::memcmp((*later)->SingleRow(i), expected.data(), rows.row_bytes), 0);
      }
    }
  }
}

// More than a row to a sample, or a gain, or a type that is no shorter: then rows travel as they
// are stored, and no others are taken.
TEST_F(LaterSumsTest, OtherRowsAreNotRounded) {
  std::mt19937_64 random(TestSeed());
  const TestShape shape{2, 16, 50};
  TestBatch batch(SingleEntries(shape, random), shape, 0, 2, 2, 1);
  StackSpec plain = OneTableStack(shape, 24, 24, Sgd());
  plain.result_mode = v1::UNIQUE_ROWS;
  StackSpec quantized = plain, half = plain, brain = plain;
  quantized.quantized = true;
  quantized.quantization.set_lower(-1);
  quantized.quantization.set_upper(1);
  quantized.quantization.set_num_buckets(16);
  half.storage_dtype = v1::FLOAT16;
  brain.storage_dtype = v1::BFLOAT16;
  preprocess::StackBatchView several = batch.view(), single = batch.view();
  single.single_rows = true;
  for (const auto& [stack, view] : {std::pair(&plain, &several), std::pair(&quantized, &single),
                                    std::pair(&half, &single), std::pair(&brain, &single)}) {
    TestEngine engine({*stack}, shape, 0, 2);
    const auto prepared = *engine.Prepare(*view, v1::BFLOAT16);
    const StackRows rows = engine.GatherEither(prepared).rows[0];
    EXPECT_FALSE(rows.rounded);
    EXPECT_EQ(rows.row_bytes, RowBytes(*stack));
    EXPECT_EQ(engine.engine().GatherBytes(*prepared), rows.bytes());
    const auto later = LaterSums::Make(*view, *stack, 2, {rows.rows}, pool_, cpu_);
    ASSERT_TRUE(later.ok()) << later.status();
    EXPECT_FALSE((*later)->single_rows());
    const std::vector<char> rounded(rows.bytes() / rows.row_bytes * 48);
    const absl::Status status =
        LaterSums::Make(*view, *stack, 2, {rounded, /*rounded=*/true}, pool_, cpu_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("which the batch does not allow"));
  }
}

TEST_F(LaterSumsTest, RefusesOtherRowsThanThoseOfTheBatch) {
  const TestShape shape{1, 16, 4};
  StackSpec stack = OneTableStack(shape, 8, 8, Sgd());
  TestBatch batch({{0, 0, 3, 1.0f}, {2, 0, 9, 1.0f}}, shape, 0, 1, 1, 1);
  const std::vector<char> rows(3 * 32);
  EXPECT_TRUE(Pool(batch.view(), stack, 1, absl::MakeConstSpan(rows).first(64)).ok());
  for (const size_t bytes : {0, 32, 63, 96}) {
    const absl::Status status =
        Pool(batch.view(), stack, 1, absl::MakeConstSpan(rows).first(bytes)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("the batch has 2 of 32 bytes"));
  }
}

TEST_F(LaterSumsTest, ABatchWithoutEntriesHasNoRowsAndNoSums) {
  const TestShape shape{2, 16, 6};
  StackSpec stack = OneTableStack(shape, 8, 8, Sgd());
  stack.result_mode = v1::UNIQUE_ROWS;
  TestEngine engine({stack}, shape, 0, 2);
  TestBatch batch({}, shape, 0, 2, 2, 1);
  const GatherOutput output = engine.GatherEither(*engine.Prepare(batch.view()));
  ASSERT_EQ(output.rows.size(), 1u);
  EXPECT_EQ(output.rows[0].bytes(), 0);
  const auto pooled = Pool(batch.view(), stack, 2, {});
  ASSERT_TRUE(pooled.ok()) << pooled.status();
  EXPECT_TRUE(pooled->samples.empty());
}

}  // namespace later_sums_test
}  // namespace emberd::shard
