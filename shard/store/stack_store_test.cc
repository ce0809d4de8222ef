// Prevents: tables that take memory before anybody looks at them, or more than their rows need;
// rows whose initial value depends on when, where or by whom they were first touched.
#include "shard/store/stack_store.h"

#include <chrono>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "base/testing/sanitized.h"
#include "shard/testing/optimizer_cases.h"
#include "shard/testing/reference.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace stack_store_test {

using testing::Row;
using testing::TestBatch;
using testing::TestEngine;
using testing::TestEntry;
using testing::TestShape;

int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size, resident;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(StackStore, RowsFollowPlacementAndRotation) {
  // Two tables of 8 live columns and 5, P = 4, this shard owns partitions 2 and 3.
  const TestShape shape{4, 16, 4};
  StackSpec stack = OneTableStack(shape, 8, 8, testing::CompleteOptimizer("adagrad {}"));
  stack.rows_per_partition = 30;
  stack.tables[0].vocabulary_size = 61;
  stack.tables[0].initializer.mutable_row_id();
  stack.tables.push_back(stack.tables[0]);
  stack.tables[1].padded_vocabulary_size = 32;
  stack.tables[1].vocabulary_size = 32;
  stack.tables[1].row_offset = 16;
  stack.tables[1].shard_rotation = 3;
  stack.tables[1].embedding_dim = 5;
  for (const int64_t eager : {0, 1 << 20}) {
    TestEngine engine({stack}, shape, 2, 2, {.eager_bytes = eager}, 1);
    for (const int partition : {2, 3}) {
      for (int local = 0; local < 16; ++local) {
        const int id = local * 4 + partition;
        EXPECT_EQ(engine.ReadRow(0, partition, local, 8), Row(8, id < 61 ? id : 0)) << id;
      }
      for (int local = 0; local < 8; ++local) {
        const float id = static_cast<float>(local * 4 + (partition - 3 + 4) % 4);
        EXPECT_EQ(engine.ReadRow(0, partition, 16 + local, 8), (Row{id, id, id, id, id, 0, 0, 0}));
        EXPECT_EQ(engine.ReadRow(0, partition, 16 + local, 8, "accumulator"),
                  (Row{0.1f, 0.1f, 0.1f, 0.1f, 0.1f, 0, 0, 0}));
      }
      for (int local = 24; local < 30; ++local) {  // rows of no table
        EXPECT_EQ(engine.ReadRow(0, partition, local, 8), Row(8, 0.0f));
      }
    }
  }
}

TEST(StackStore, RefusesTablesThatDoNotFit) {
  const TestShape shape{4, 16, 4};
  CpuPool cpu(1);
  auto engine = *Engine::Create({.cpu = &cpu});
  const auto create = [&](const std::function<void(ModelSpec&)>& change) {
    ModelSpec spec;
    spec.model_id = 1;
    spec.partitions = 4;
    spec.partition_count = 2;
    spec.stacks = {OneTableStack(shape, 8, 8, testing::CompleteOptimizer("sgd {}"))};
    change(spec);
    const absl::StatusCode code = engine->CreateModel(spec).code();
    engine->DropModel(1).IgnoreError();
    return code;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(create([](ModelSpec&) {}), absl::StatusCode::kOk);
  EXPECT_EQ(create([](ModelSpec& m) { m.partition_count = 3; }), kInvalid);
  EXPECT_EQ(create([](ModelSpec& m) { m.first_partition = 1; }), kInvalid);
  EXPECT_EQ(create([](ModelSpec& m) { m.first_partition = 4; }), kInvalid);
  EXPECT_EQ(create([](ModelSpec& m) { m.stacks[0].embedding_dim = 12; }), kInvalid);
  EXPECT_EQ(create([](ModelSpec& m) { m.stacks[0].rows_per_partition = 15; }), kInvalid);
  EXPECT_EQ(create([](ModelSpec& m) { m.stacks[0].rows_per_partition = int64_t{1} << 32; }),
            kInvalid);
  EXPECT_EQ(create([](ModelSpec& m) { m.stacks[0].storage_dtype = v1::INT32; }), kInvalid);
  EXPECT_EQ(create([](ModelSpec& m) { m.stacks[0].tables[0].row_offset = 1; }), kInvalid);
  EXPECT_EQ(create([](ModelSpec& m) { m.stacks[0].tables[0].embedding_dim = 9; }), kInvalid);
  EXPECT_EQ(create([](ModelSpec& m) { m.stacks[0].tables[0].vocabulary_size = 65; }), kInvalid);
  EXPECT_EQ(create([](ModelSpec& m) { m.stacks[0].tables[0].shard_rotation = 4; }), kInvalid);
  EXPECT_EQ(create([](ModelSpec& m) { m.stacks[0].tables.push_back(m.stacks[0].tables[0]); }),
            kInvalid);
  EXPECT_EQ(engine->Statistics().models, 0);
}

TEST(StackStore, ABillionRowsCostOnlyThePagesTouched) {
  if (kSanitized) GTEST_SKIP() << "measures memory";
  constexpr int64_t kRows = 1'000'000'000;
  constexpr int kLookups = 2000;
  const TestShape shape{1, kRows, kLookups};
  const StackSpec stack = OneTableStack(shape, 32, 32, testing::CompleteOptimizer("adagrad {}"));
  const int64_t before = ResidentBytes();
  const auto start = std::chrono::steady_clock::now();
  TestEngine engine({stack}, shape, 0, 1, {.bytes_per_partition = int64_t{1} << 40});
  printf("declared in %.3f s\n",
         std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  EXPECT_EQ(engine.engine().Statistics().table_bytes, kRows * 32 * 8);
  EXPECT_LT(ResidentBytes() - before, 8 << 20);

  std::mt19937_64 random(TestSeed());
  std::vector<TestEntry> entries;
  for (int i = 0; i < kLookups; ++i) {
    entries.push_back({i, 0, static_cast<int32_t>(random() % kRows), 1.0f});
  }
  TestBatch test_batch(entries, shape, 0, 1, 1, 1);
  const auto batch = *engine.Prepare(test_batch.view());
  const StackSums sums = engine.Gather(batch)[0];
  // A page each of weights, accumulators and bitmap, with page tables and buffers besides.
  EXPECT_LT(ResidentBytes() - before, (8 << 20) + int64_t{kLookups} * 4 * 4096);
  std::vector<float> row(32);
  for (int i = 0; i < kLookups; ++i) {
    Initializer(1, "table", stack.tables[0].initializer).Fill(entries[i].row, absl::MakeSpan(row));
    ASSERT_TRUE(std::equal(row.begin(), row.end(), sums.sums.data() + i * 32)) << entries[i].row;
  }
  ApplyInput input;
  EXPECT_GT(engine.Apply(batch, input), kLookups * 9 / 10);
}

TEST(StackStore, DenseTableTakesItsRowsAndLittleMore) {
  if (kSanitized) GTEST_SKIP() << "measures memory";
  constexpr int64_t kRows = 400'000;
  const TestShape shape{2, kRows / 2, 1};
  for (const auto& [dtype, row_bytes] : {std::pair(v1::FLOAT32, 32 * 8), {v1::FLOAT16, 32 * 6}}) {
    StackSpec stack = OneTableStack(shape, 32, 32, testing::CompleteOptimizer("adagrad {}"));
    stack.storage_dtype = dtype;
    const int64_t before = ResidentBytes();
    TestEngine engine({stack}, shape, 0, 2, {.eager_bytes = int64_t{1} << 30}, 1);
    EXPECT_LT(ResidentBytes() - before, kRows * row_bytes * 1.10);
    EXPECT_GE(ResidentBytes() - before, kRows * row_bytes * 0.99);
  }
}

}  // namespace stack_store_test
}  // namespace emberd::shard
