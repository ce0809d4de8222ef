// Models that leave an engine's memory and come back must not notice: three of them that are
// trained in turns with memory for two have the bits of an engine that keeps all of them. A row
// that is written too early or too late, a slot or a half-filled chunk that is forgotten, and a
// snapshot of rows that are elsewhere would show here.
//
// Covers: store/stack_store.cc
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/temp_dir.h"
#include "shard/memory/memory_manager.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard::testing {
namespace eviction_test {

constexpr int kModels = 3;
constexpr int kWidth = 16;
constexpr int kColumns = 12;
const TestShape kShape = {.partitions = 2, .rows_per_partition = 512, .samples = 24};

ModelSpec SpecOf(int model) {
  v1::OptimizerConfig optimizer;
  optimizer.set_learning_rate(0.1);
  optimizer.mutable_adagrad()->set_initial_accumulator(0.1);
  ModelSpec spec;
  spec.model_id = model + 1;
  spec.name = "model-" + std::to_string(model);
  spec.seed = model;
  spec.partitions = spec.partition_count = kShape.partitions;
  spec.stacks = {OneTableStack(kShape, kWidth, kColumns, optimizer)};
  spec.stacks.push_back(spec.stacks[0]);
  spec.stacks[1].name = "halves";
  spec.stacks[1].storage_dtype = v1::BFLOAT16;
  spec.stacks[1].stochastic_rounding = true;
  return spec;
}

int64_t BytesOf(const ModelSpec& spec) {
  int64_t bytes = 0;
  for (const StackSpec& stack : spec.stacks) bytes += StackStore::BytesPerPartition(stack);
  return bytes;
}

struct Trainer {
  explicit Trainer(std::shared_ptr<MemoryManager> memory, int64_t eager_bytes) : cpu(2) {
    EngineOptions options;
    options.cpu = &cpu;
    options.eager_bytes = eager_bytes;
    options.memory = std::move(memory);
    engine = *Engine::Create(options);
    for (int i = 0; i < kModels; ++i) {
      const absl::Status status = engine->CreateModel(SpecOf(i));
      EXPECT_TRUE(status.ok()) << status;
    }
  }

  // What the lookup gives.
  std::vector<float> Step(int model, int step) {
    std::mt19937_64 random(model * 1000 + step);
    std::vector<std::unique_ptr<TestBatch>> stacks;
    std::vector<preprocess::StackBatchView> views;
    for (int stack = 0; stack < 2; ++stack) {
      const auto entries = RandomEntries(kShape, /*mean_bag=*/3, random);
      stacks.push_back(
          std::make_unique<TestBatch>(entries, kShape, 0, kShape.partitions, 2, 1, 2, stack));
      views.push_back(stacks.back()->view());
    }
    auto batch = *engine->PrepareBatch(model + 1, views, nullptr);
    std::promise<GatherOutput> gathered;
    engine->Gather(batch, {}, [&](absl::StatusOr<GatherOutput> output) {
      EXPECT_TRUE(output.ok()) << output.status();
      gathered.set_value(output.ok() ? *std::move(output) : GatherOutput());
    });
    const GatherOutput output = gathered.get_future().get();
    ApplyInput input;
    input.step = step;
    std::vector<float> activations;
    std::vector<std::vector<float>> gradients;
    for (const StackSums& sums : output.sums) {
      const auto size = static_cast<int64_t>(sums.sums.size());
      activations.insert(activations.end(), sums.sums.begin(), sums.sums.end());
      std::vector<float>& values = gradients.emplace_back(size);
      for (int64_t i = 0; i < size; ++i) {
        values[i] = i % kWidth < kColumns ? sums.sums[i] - 0.5f : 0;
      }
    }
    for (size_t i = 0; i < output.sums.size(); ++i) {
      input.stacks.push_back({output.sums[i].stack, gradients[i], {}});
    }
    auto part = CheckedPart::Make(batch, std::move(input));
    EXPECT_TRUE(part.ok()) << part.status();
    std::promise<void> applied;
    engine->Apply(StagedUpdate(*std::move(part)), [&](const auto& result) {
      EXPECT_TRUE(result.ok()) << result.status();
      applied.set_value();
    });
    applied.get_future().wait();
    return activations;
  }

  // All rows and slots that a snapshot has.
  std::string Rows(int model) {
    std::string bytes;
    auto snapshot = BeginSnapshot(*engine, model + 1, {.copy_bytes = 1 << 20});
    EXPECT_TRUE(snapshot.ok()) << snapshot.status();
    while (true) {
      auto rows = *(*snapshot)->Next();
      if (!rows.has_value()) break;
      for (const SnapshotRows::Run& run : rows->runs) {
        bytes += std::to_string(rows->stack) + "/" + std::to_string(rows->k) + "/" +
                 std::to_string(run.first) + "+" + std::to_string(run.count) + ":";
      }
      for (const auto& array : rows->arrays) bytes.append(array.data(), array.size());
    }
    engine->EndSnapshot(*snapshot, /*kept=*/true);
    return bytes;
  }

  CpuPool cpu;
  std::unique_ptr<Engine> engine;
};

std::shared_ptr<MemoryManager> MemoryForTwo(const TempDir& dir, int64_t spill_bytes = 0,
                                            int64_t host_bytes = 0) {
  MemoryOptions options;
  options.bytes = 2 * BytesOf(SpecOf(0));
  options.folder = dir.path();
  options.spill_bytes = spill_bytes;
  options.host_bytes = host_bytes;
  // A use ends a moment after its step was answered.
  options.wait = spill_bytes > 0 ? std::chrono::milliseconds(0) : std::chrono::minutes(5);
  return *MemoryManager::Create(options);
}

class EvictionTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(EvictionTest, ThreeModelsWithMemoryForTwoHaveTheBitsOfThreeThatStay) {
  const TempDir dir = *TempDir::Create();
  for (const int64_t host_bytes : {int64_t{0}, BytesOf(SpecOf(0))}) {
    Trainer all(nullptr, GetParam());
    Trainer two(MemoryForTwo(dir, 0, host_bytes), GetParam());
    for (int step = 0; step < 6; ++step) {
      for (int model = 0; model < kModels; ++model) {
        EXPECT_EQ(two.Step(model, step), all.Step(model, step)) << model << ", step " << step;
      }
    }
    for (int model = 0; model < kModels; ++model) {
      const std::string rows = two.Rows(model);
      EXPECT_FALSE(rows.empty());
      EXPECT_TRUE(rows == all.Rows(model)) << "model " << model;
    }
    // Most of the 21 uses found their model elsewhere; how many depends on when uses end.
    EXPECT_GE(two.engine->memory()->Figures().returns(), 6);
  }
}

TEST_P(EvictionTest, AFullDiskIsAnErrorAndLosesNothing) {
  const TempDir dir = *TempDir::Create();
  Trainer all(nullptr, GetParam());
  // Not one model fits on the disk, but for those of which no row has a value yet.
  Trainer two(MemoryForTwo(dir, /*spill_bytes=*/1), /*eager_bytes=*/0);
  for (int model : {1, 2}) {
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(two.Step(model, step), all.Step(model, step));
    }
  }
  const std::vector<int32_t> partitions = {0};
  const std::vector<int64_t> rows = {0};
  std::vector<float> values(kColumns);
  const absl::Status refused = [&] {
    std::promise<absl::Status> read;
    two.engine->ReadRows({1, 0, "", partitions, rows, kColumns}, absl::MakeSpan(values),
                         [&](absl::Status status) { read.set_value(std::move(status)); });
    return read.get_future().get();
  }();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("eviction.spill_bytes"));
  for (int model : {1, 2}) {
    EXPECT_EQ(two.Step(model, 3), all.Step(model, 3));
    EXPECT_TRUE(two.Rows(model) == all.Rows(model));
  }
}

TEST_P(EvictionTest, AStagedUpdateAndASnapshotKeepTheirModel) {
  const TempDir dir = *TempDir::Create();
  Trainer two(MemoryForTwo(dir), GetParam());
  auto snapshot = *BeginSnapshot(*two.engine, 1, {.copy_bytes = 1 << 20});
  auto batch = *two.engine->PrepareBatch(2, {}, nullptr);
  auto part = *CheckedPart::Make(batch, {});
  ASSERT_TRUE(two.engine->memory()->ReleaseAll().ok());
  const auto places = [&] {
    std::vector<v1::MemoryTable::Place> places(kModels);
    const v1::MemoryStatus figures = two.engine->memory()->Figures();
    for (const v1::MemoryTable& table : figures.tables()) {
      places[table.model().back() - '0'] = table.place();
    }
    return places;
  };
  constexpr auto kSparseCore = v1::MemoryTable::SPARSECORE, kSpilled = v1::MemoryTable::SPILLED;
  EXPECT_THAT(places(), ::testing::ElementsAre(kSparseCore, kSparseCore, kSpilled));
  part = nullptr;
  ASSERT_TRUE(two.engine->memory()->ReleaseAll().ok());
  EXPECT_THAT(places(), ::testing::ElementsAre(kSparseCore, kSpilled, kSpilled));
  two.engine->EndSnapshot(snapshot, /*kept=*/false);
  ASSERT_TRUE(two.engine->DropModel(2).ok());
}

TEST_P(EvictionTest, AStagedAssignmentKeepsItsModel) {
  const TempDir dir = *TempDir::Create();
  Trainer two(MemoryForTwo(dir), GetParam());
  const std::vector<int32_t> partitions = {0, 1};
  const std::vector<int64_t> rows = {3, 500};
  const RowSelection selection = {3, 0, "", partitions, rows, kColumns};
  const std::vector<float> values(2 * kColumns, 7.0f);
  auto assign = *two.engine->StageAssign(selection, values, nullptr);
  ASSERT_TRUE(two.engine->memory()->ReleaseAll().ok());
  const v1::MemoryStatus figures = two.engine->memory()->Figures();
  for (const v1::MemoryTable& table : figures.tables()) {
    EXPECT_EQ(table.place() == v1::MemoryTable::SPARSECORE, table.model() == "model-2")
        << table.model();
  }
  std::promise<absl::Status> assigned;
  two.engine->Assign(assign, [&](const absl::Status& status) { assigned.set_value(status); });
  EXPECT_TRUE(assigned.get_future().get().ok());
  assign = nullptr;
  for (const int model : {0, 1}) two.Step(model, 0);  // in its place
  std::vector<float> read(2 * kColumns);
  std::promise<absl::Status> done;
  two.engine->ReadRows(selection, absl::MakeSpan(read),
                       [&](absl::Status status) { done.set_value(std::move(status)); });
  EXPECT_TRUE(done.get_future().get().ok());
  EXPECT_EQ(read, values);
}

INSTANTIATE_TEST_SUITE_P(Rows, EvictionTest, ::testing::Values(0, int64_t{64} << 20),
                         [](const auto& info) { return info.param == 0 ? "lazy" : "eager"; });

}  // namespace eviction_test
}  // namespace emberd::shard::testing
