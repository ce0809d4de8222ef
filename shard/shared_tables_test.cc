// Stacks that models share. Two models that train one table in turns must make the bits of one
// model that does all of it: this would catch rows or slots that a model has of its own, or a count
// that belongs to the model. Trainers at once must lose nothing: sums of whole numbers are exact,
// and show updates of two models that run beside one another. And a table is made once, and goes
// with its last model, whatever still works on it.
//
// Covers: store/model.cc
#include <chrono>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "shard/memory/memory_manager.h"
#include "shard/testing/optimizer_cases.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard::testing {
namespace shared_tables_test {

using ::testing::HasSubstr;

constexpr int kWidth = 16;
const TestShape kShape = {.partitions = 2, .rows_per_partition = 64, .samples = 24};
const int64_t kRows = kShape.partitions * kShape.rows_per_partition;

// A model with the shared table behind `own` tables of its own.
ModelSpec Sharing(uint64_t id, int own, const std::string& optimizer = "adagrad {}") {
  ModelSpec spec;
  spec.model_id = id;
  spec.name = absl::StrCat("m", id);
  spec.seed = 1;
  spec.partitions = spec.partition_count = kShape.partitions;
  for (int i = 0; i < own; ++i) {
    spec.stacks.push_back(OneTableStack(kShape, 8, 8, CompleteOptimizer("sgd {}")));
    spec.stacks.back().name = spec.stacks.back().tables[0].name = absl::StrCat("own", i);
  }
  spec.stacks.push_back(OneTableStack(kShape, kWidth, kWidth, CompleteOptimizer(optimizer)));
  spec.stacks.back().resource = "c/r";
  return spec;
}

int64_t SharedBytes() {
  return StackStore::BytesPerPartition(Sharing(1, 0).stacks[0]) * kShape.partitions;
}
int64_t OwnBytes() {
  return StackStore::BytesPerPartition(Sharing(1, 1).stacks[0]) * kShape.partitions;
}

struct Models {
  explicit Models(EngineOptions options = {}) : cpu(3) {
    options.cpu = &cpu;
    engine = *Engine::Create(options);
  }

  void Create(const ModelSpec& spec) {
    const absl::Status status = engine->CreateModel(spec);
    ASSERT_TRUE(status.ok()) << status;
  }

  // One update of a table by a model, with gradients from `random`; whole ones of 1: `ones`.
  void Update(uint64_t model, int stack, const std::vector<TestEntry>& entries,
              std::mt19937_64& random, bool ones = false) {
    TestBatch batch(entries, kShape, 0, kShape.partitions, 2, 1, 2, stack);
    auto prepared = engine->PrepareBatch(model, {batch.view()}, nullptr);
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    const int width = stack == 0 && model % 2 == 0 ? 8 : kWidth;
    std::vector<float> gradients((*prepared)->stacks()[0].samples.size() * width, 1.0f);
    for (float& g : gradients) g = ones ? 1 : static_cast<float>(random() % 64) / 16 - 2;
    ApplyInput input;
    input.stacks = {{stack, gradients, {}}};
    StagedUpdate update = *Stage({{*prepared, input}});
    std::promise<absl::Status> done;
    engine->Apply(std::move(update), [&](const absl::StatusOr<ApplyResult>& result) {
      done.set_value(result.status());
    });
    const absl::Status status = done.get_future().get();
    EXPECT_TRUE(status.ok()) << status;
  }

  // All values of a table, or of a slot of it.
  std::vector<float> Values(uint64_t model, int stack, const std::string& slot = "",
                            int columns = kWidth) {
    std::vector<int32_t> partitions;
    std::vector<int64_t> rows;
    for (int64_t row = 0; row < kRows; ++row) {
      partitions.push_back(static_cast<int32_t>(row / kShape.rows_per_partition));
      rows.push_back(row % kShape.rows_per_partition);
    }
    std::vector<float> values(kRows * columns);
    std::promise<absl::Status> done;
    engine->ReadRows({model, stack, slot, partitions, rows, columns}, absl::MakeSpan(values),
                     [&](const absl::Status& status) { done.set_value(status); });
    const absl::Status status = done.get_future().get();
    EXPECT_TRUE(status.ok()) << status;
    return values;
  }

  int64_t bytes() { return engine->Statistics().table_bytes; }

  CpuPool cpu;
  std::unique_ptr<Engine> engine;
};

// The models of even number have a table of their own before the shared one.
ModelSpec Even(uint64_t id) { return Sharing(id, 1); }
ModelSpec Odd(uint64_t id) { return Sharing(id, 0); }

TEST(SharedStacks, TwoModelsThatTrainInTurnsAreOneThatDoesAllOfIt) {
  Models two, one;
  two.Create(Odd(7));
  two.Create(Even(8));
  ModelSpec alone = Odd(7);
  alone.stacks[0].resource.clear();
  one.Create(alone);
  EXPECT_EQ(two.Values(8, 1), one.Values(7, 0));
  std::mt19937_64 random(1), same(1);
  for (int step = 0; step < 40; ++step) {
    const bool second = step % 3 == 1;
    two.Update(second ? 8 : 7, second ? 1 : 0, RandomEntries(kShape, 3, random), random);
    one.Update(7, 0, RandomEntries(kShape, 3, same), same);
  }
  for (const std::string slot : {"", "accumulator"}) {
    EXPECT_EQ(two.Values(7, 0, slot), one.Values(7, 0, slot));
    EXPECT_EQ(two.Values(8, 1, slot), one.Values(7, 0, slot));
  }
}

TEST(SharedStacks, TrainersOfBothModelsLoseNothing) {
  constexpr int kThreads = 8, kUpdates = 400;
  Models models;
  for (ModelSpec spec :
       {Sharing(7, 0, "learning_rate: 1 sgd {}"), Sharing(8, 1, "learning_rate: 1 sgd {}")}) {
    spec.stacks.back().tables[0].initializer.mutable_zeros();
    models.Create(spec);
  }
  std::vector<TestEntry> entries;  // few rows, which all trainers want
  for (int32_t row = 0; row < 8; ++row) entries.push_back({row, row % 2, row, 1.0f});
  std::sort(entries.begin(), entries.end(),
            [](const TestEntry& a, const TestEntry& b) { return a.sample < b.sample; });
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      const uint64_t model = t % 2 == 0 ? 7 : 8;
      for (int i = 0; i < kUpdates; ++i) {
        models.Update(model, model == 7 ? 0 : 1, entries, random, /*ones=*/true);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<float> values = models.Values(8, 1);
  for (int row = 0; row < 8; ++row) {
    const int64_t at = (row % 2 * kShape.rows_per_partition + row) * kWidth;
    for (int c = 0; c < kWidth; ++c) ASSERT_EQ(values[at + c], -kThreads * kUpdates) << row;
  }
  EXPECT_EQ(models.Values(7, 0), values);
}

TEST(SharedStacks, TheLastModelThatGoesTakesThemAlong) {
  for (const bool first_goes_first : {true, false}) {
    Models models;
    models.Create(Odd(7));
    const std::vector<float> initial = models.Values(7, 0);
    models.Create(Even(8));
    EXPECT_EQ(models.bytes(), SharedBytes() + OwnBytes());
    EXPECT_EQ(models.engine->Statistics().partitions[1].table_bytes,
              (SharedBytes() + OwnBytes()) / kShape.partitions);
    std::mt19937_64 random(3);
    models.Update(7, 0, RandomEntries(kShape, 3, random), random);
    const std::vector<float> trained = models.Values(7, 0);
    const uint64_t goes = first_goes_first ? 7 : 8, stays = first_goes_first ? 8 : 7;
    ASSERT_TRUE(models.engine->DropModel(goes).ok());
    EXPECT_EQ(models.Values(stays, stays == 8 ? 1 : 0), trained);
    models.Create(goes == 7 ? Odd(7) : Even(8));
    EXPECT_EQ(models.Values(goes, goes == 8 ? 1 : 0), trained);
    ASSERT_TRUE(models.engine->DropModel(7).ok());
    ASSERT_TRUE(models.engine->DropModel(8).ok());
    EXPECT_EQ(models.bytes(), 0);
    models.Create(Even(8));
    EXPECT_EQ(models.Values(8, 1), initial);
  }
}

// Whoever holds the model does not matter: a log that has the drop makes nothing of it afterwards.
TEST(SharedStacks, WhatIsStagedWhenItsModelIsDroppedChangesNothing) {
  Models models;
  models.Create(Odd(7));
  models.Create(Even(8));
  const std::vector<float> before = models.Values(8, 1);
  std::mt19937_64 random(3);
  TestBatch batch(RandomEntries(kShape, 3, random), kShape, 0, kShape.partitions, 2, 1, 2, 0);
  const auto prepared = models.engine->PrepareBatch(7, {batch.view()}, nullptr);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  const std::vector<float> gradients((*prepared)->stacks()[0].samples.size() * kWidth, 1.0f);
  ApplyInput input;
  input.stacks = {{0, gradients, {}}};
  StagedUpdate update = *Stage({{*prepared, input}});
  const std::vector<int32_t> partitions = {0, 1};
  const std::vector<int64_t> rows = {3, 5};
  const std::vector<float> values(2 * kWidth, 7.0f);
  const auto assign =
      models.engine->StageAssign({7, 0, "", partitions, rows, kWidth}, values, nullptr);
  ASSERT_TRUE(assign.ok()) << assign.status();

  const auto held = models.engine->TakeModel(7);
  ASSERT_TRUE(held.ok()) << held.status();
  std::promise<absl::Status> applied, assigned;
  models.engine->Apply(std::move(update), [&](const absl::StatusOr<ApplyResult>& result) {
    applied.set_value(result.status());
  });
  models.engine->Assign(*assign, [&](const absl::Status& status) { assigned.set_value(status); });
  EXPECT_EQ(applied.get_future().get().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(assigned.get_future().get().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(models.Values(8, 1), before);
}

TEST(SharedStacks, WhoComesAfterTheLastModelGetsNewRowsWhileOldOnesAreInUse) {
  Models models;
  models.Create(Odd(7));
  const std::vector<float> initial = models.Values(7, 0);
  std::mt19937_64 random(3);
  models.Update(7, 0, RandomEntries(kShape, 3, random), random);
  const auto in_use = BeginSnapshot(*models.engine, 7, {.copy_bytes = 1 << 20});
  ASSERT_TRUE(in_use.ok());
  ASSERT_TRUE(models.engine->DropModel(7).ok());
  models.Create(Even(8));
  EXPECT_EQ(models.Values(8, 1), initial);
  models.engine->EndSnapshot(*in_use, false);
}

TEST(SharedStacks, OneThatDoesNotFitIsNamedWithItsModel) {
  Models models({.bytes_per_partition = SharedBytes() / kShape.partitions - 1});
  const absl::Status full = models.engine->CreateModel(Sharing(7, 0));
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("model m7: resource c/r: needs "));
}

TEST(SharedStacks, OfManyWhoCreateModelsAtOnceOneMakesThem) {
  constexpr int kThreads = 16;
  Models models({.bytes_per_partition = SharedBytes() / kShape.partitions});
  std::vector<std::thread> threads;
  std::vector<absl::Status> results(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] { results[t] = models.engine->CreateModel(Odd(2 * t + 1)); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) EXPECT_TRUE(result.ok()) << result;
  EXPECT_EQ(models.bytes(), SharedBytes());
  std::mt19937_64 random(3);
  models.Update(1, 0, RandomEntries(kShape, 3, random), random);
  const std::vector<float> trained = models.Values(1, 0);
  for (int t = 1; t < kThreads; ++t) EXPECT_EQ(models.Values(2 * t + 1, 0), trained);
  for (int t = 0; t < kThreads; ++t) EXPECT_TRUE(models.engine->DropModel(2 * t + 1).ok());
  EXPECT_EQ(models.bytes(), 0);
}

TEST(SharedStacks, WhatDiffersIsNamed) {
  struct Case {
    void (*change)(ModelSpec&);
    const char* field;
  };
  const Case kCases[] = {
      {[](ModelSpec& m) { m.seed = 2; }, "seed 1, not 2"},
      {[](ModelSpec& m) { m.stacks[0].storage_dtype = v1::BFLOAT16; },
       "storage_dtype FLOAT32, not BFLOAT16"},
      {[](ModelSpec& m) { m.stacks[0].tables[0].vocabulary_size = 100; },
       "vocabulary_size 128, not 100"},
      {[](ModelSpec& m) { m.stacks[0].tables[0].embedding_dim = 12; }, "embedding_dim 16, not 12"},
      {[](ModelSpec& m) { m.stacks[0].tables[0].name = "u"; }, "seed_name table, not u"},
      {[](ModelSpec& m) { m.stacks[0].tables[0].initializer.mutable_zeros(); }, "initializer"},
      {[](ModelSpec& m) { m.stacks[0].optimizer.set_learning_rate(0.5); }, "optimizer"},
      {[](ModelSpec& m) { m.stacks[0].optimizer = CompleteOptimizer("sgd {}"); }, "optimizer"},
      {[](ModelSpec& m) { m.stacks[0].skip_nonfinite = true; }, "REJECT, not SKIP_ROW"},
      {[](ModelSpec& m) { m.stacks[0].quantized = true; }, "quantization absent"},
      {[](ModelSpec& m) { m.stacks[0].result_mode = v1::UNIQUE_ROWS; }, "result_mode"},
  };
  Models models;
  models.Create(Odd(7));
  for (const Case& c : kCases) {
    ModelSpec other = Odd(9);
    c.change(other);
    const absl::Status status = models.engine->CreateModel(other);
    EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << c.field;
    EXPECT_THAT(std::string(status.message()), HasSubstr("resource 'c/r' is held by 'm7' with"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.field));
  }
  EXPECT_EQ(models.bytes(), SharedBytes());
  ModelSpec two_tables = Odd(9);
  two_tables.stacks[0].resource = "other";
  two_tables.stacks[0].tables[0].shard_rotation = 1;
  EXPECT_EQ(models.engine->CreateModel(two_tables).code(), absl::StatusCode::kInvalidArgument);
}

// Names are what a model calls the rows; what they began with is theirs.
TEST(SharedStacks, NamesDifferFromModelToModel) {
  Models models;
  models.Create(Odd(7));
  ModelSpec other = Odd(9);
  other.stacks[0].name = other.stacks[0].tables[0].name = "u";
  other.stacks[0].tables[0].seed_name = "table";
  models.Create(other);
  const std::vector<float> initial = models.Values(7, 0);
  EXPECT_EQ(models.Values(9, 0), initial);
  ASSERT_TRUE(models.engine->DropModel(7).ok());
  ASSERT_TRUE(models.engine->DropModel(9).ok());
  models.Create(other);
  EXPECT_EQ(models.Values(9, 0), initial);
  const std::vector<HotTable> hot = models.engine->HotRows(1);
  ASSERT_FALSE(hot.empty());
  EXPECT_EQ(hot[0].table, "u");
}

TEST(SharedStacks, RowsFromElsewhereNeedThemAlone) {
  Models models;
  models.Create(Odd(7));
  const auto refused = models.engine->MakeModel(Even(8));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("resource 'c/r' is held by 'm7'"));
  ASSERT_TRUE(models.engine->DropModel(7).ok());
  {
    const auto given_up = models.engine->MakeModel(Even(8));
    ASSERT_TRUE(given_up.ok());
    EXPECT_EQ(models.engine->CreateModel(Odd(7)).code(), absl::StatusCode::kUnavailable);
  }
  const auto made = models.engine->MakeModel(Even(8));
  ASSERT_TRUE(made.ok());
  const std::vector<float> row(kWidth, 3.0f);
  (*made)->stack(1).LoadWeights(0, 5, {reinterpret_cast<const char*>(row.data()), kWidth * 4});
  ASSERT_TRUE(models.engine->AddModel(*made).ok());
  models.Create(Odd(7));
  EXPECT_EQ(models.Values(7, 0)[5 * kWidth], 3.0f);
}

TEST(SharedStacks, OneSnapshotAtATimeAndAlwaysOfEverything) {
  Models models;
  models.Create(Odd(7));
  models.Create(Even(8));
  const auto first = BeginSnapshot(*models.engine, 7, {.copy_bytes = 1 << 20});
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(BeginSnapshot(*models.engine, 8, {.copy_bytes = 1 << 20}).status().code(),
            absl::StatusCode::kAborted);
  models.engine->EndSnapshot(*first, true);
  const auto second = BeginSnapshot(*models.engine, 8, {.copy_bytes = 1 << 20});
  EXPECT_TRUE(second.ok()) << second.status();
  models.engine->EndSnapshot(*second, true);
  EXPECT_EQ(BeginSnapshot(*models.engine, 7, {.changed_only = true, .copy_bytes = 1 << 20})
                .status()
                .code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(SharedStacks, OneSnapshotHasTheRowsOfAllModelsAtOneMoment) {
  Models models;
  models.Create(Odd(7));
  models.Create(Even(8));
  std::mt19937_64 random(5);
  models.Update(7, 0, RandomEntries(kShape, 3, random), random);
  models.Update(8, 0, RandomEntries(kShape, 3, random), random);
  const auto made = models.engine->MakeSnapshot({7, 8}, {.copy_bytes = 1 << 20});
  ASSERT_TRUE(made.ok()) << made.status();
  Snapshot& snapshot = **made;
  models.Update(8, 1, RandomEntries(kShape, 3, random), random);  // it has not begun yet
  models.engine->StartSnapshot(snapshot);
  // By number of the store: the shared one, and that of the second model.
  ASSERT_EQ(snapshot.stores().size(), 2u);
  const std::vector<float> shared = models.Values(7, 0), own = models.Values(8, 0, "", 8);
  models.Update(7, 0, RandomEntries(kShape, 3, random), random);
  models.Update(8, 0, RandomEntries(kShape, 3, random), random);
  EXPECT_NE(models.Values(7, 0), shared);
  int64_t rows_of[2] = {0, 0};
  while (true) {
    const auto rows = snapshot.Next();
    ASSERT_TRUE(rows.ok()) << rows.status();
    if (!rows->has_value()) break;
    const std::vector<float>& expected = (*rows)->stack == 0 ? shared : own;
    const int width = (*rows)->stack == 0 ? kWidth : 8;
    int64_t done = 0;
    for (const SnapshotRows::Run& run : (*rows)->runs) {
      const auto* const values =
          reinterpret_cast<const float*>((*rows)->arrays[0].data()) + done * width;
      const int64_t first = (*rows)->k * kShape.rows_per_partition + run.first;
      for (int64_t i = 0; i < run.count * width; ++i) {
        ASSERT_EQ(values[i], expected[first * width + i]) << (*rows)->stack << ", " << i;
      }
      done += run.count;
    }
    rows_of[(*rows)->stack] += done;
  }
  EXPECT_GT(rows_of[0], 0);
  EXPECT_LE(rows_of[0], kRows) << "some rows came twice";
  EXPECT_GT(rows_of[1], 0);
  models.engine->EndSnapshot(*made, /*kept=*/true);
}

TEST(SharedStacks, RowsThatHaveAnEpochAlreadyPassItsChangesOver) {
  Models models;
  models.Create(Odd(7));
  models.Create(Even(8));
  const auto joined = models.engine->MakeModel(Even(10), /*alone=*/false);
  ASSERT_TRUE(joined.ok()) << joined.status();
  (*joined)->stack(1).set_first_epoch(5);
  const std::vector<float> shared = models.Values(7, 0), own = models.Values(8, 0, "", 8);
  std::mt19937_64 random(5);
  for (const uint64_t epoch : {4, 5}) {
    models.engine->SetEpoch(epoch);
    models.Update(7, 0, RandomEntries(kShape, 3, random), random);
    models.Update(8, 1, RandomEntries(kShape, 3, random), random);
    models.Update(8, 0, RandomEntries(kShape, 3, random), random);
    EXPECT_EQ(models.Values(7, 0) == shared, epoch == 4);
    EXPECT_NE(models.Values(8, 0, "", 8), own);
  }
}

TEST(SharedStacks, SharedRowsStayWhenOthersAreEvicted) {
  const TempDir folder = *TempDir::Create();
  MemoryOptions options;
  options.folder = folder.path();
  // For the shared table once and one of the two tables of the models' own.
  options.bytes = (SharedBytes() + OwnBytes()) / kShape.partitions;
  const auto memory = *MemoryManager::Create(options);
  Models models({.memory = memory}), all;
  for (Models* to : {&models, &all}) {
    to->Create(Even(8));
    to->Create(Even(10));
  }
  std::mt19937_64 random(3), same(3);
  for (int step = 0; step < 12; ++step) {
    const uint64_t model = step % 2 == 0 ? 8 : 10;
    models.Update(model, step / 2 % 2, RandomEntries(kShape, 3, random), random);
    all.Update(model, step / 2 % 2, RandomEntries(kShape, 3, same), same);
  }
  for (const uint64_t model : {8, 10}) {
    EXPECT_EQ(models.Values(model, 1), all.Values(model, 1));
    EXPECT_EQ(models.Values(model, 0, "", 8), all.Values(model, 0, "", 8));
  }
  EXPECT_EQ(models.Values(10, 1), models.Values(8, 1));
  const v1::MemoryStatus figures = memory->Figures();
  EXPECT_GT(figures.evictions(), 4);
  int shared = 0;
  for (const v1::MemoryTable& table : figures.tables()) {
    if (table.model() != "resource c/r") continue;
    ++shared;
    EXPECT_EQ(table.place(), v1::MemoryTable::SPARSECORE);
    EXPECT_EQ(table.bytes(), SharedBytes() / kShape.partitions);
  }
  EXPECT_EQ(shared, 1);
  ASSERT_TRUE(models.engine->DropModel(8).ok());
  ASSERT_TRUE(models.engine->DropModel(10).ok());
  // The thread that made the last update may still hold its rows for a moment.
  EXPECT_TRUE(Eventually([&] { return memory->Figures().free_bytes() == options.bytes; }));
}

}  // namespace shared_tables_test
}  // namespace emberd::shard::testing
