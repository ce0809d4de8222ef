#include "shard/snapshot/snapshot.h"

#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "base/testing/seed.h"
#include "shard/testing/optimizer_cases.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace snapshot_test {

using testing::TestBatch;
using testing::TestEngine;
using testing::TestShape;

// Chunks of 16 rows of weights, so that they lie across partitions.
constexpr TestShape kShape = {.partitions = 4, .rows_per_partition = 1000, .samples = 48};
constexpr int kWidth = 64;

// A run: the same updates for every engine that makes them.
class Training {
 public:
  Training(const std::string& optimizer, v1::DataType dtype, uint64_t seed) : seed_(seed) {
    StackSpec stack =
        testing::OneTableStack(kShape, kWidth, kWidth, testing::CompleteOptimizer(optimizer));
    stack.storage_dtype = dtype;
    stack.stochastic_rounding = dtype != v1::FLOAT32;
    stacks_ = {stack};
  }

  std::unique_ptr<TestEngine> Start(int64_t eager_bytes = 0, int first = 0, int count = 4) const {
    return std::make_unique<TestEngine>(stacks_, kShape, first, count,
                                        EngineOptions{.eager_bytes = eager_bytes});
  }
  void Step(TestEngine& engine, int step) const {
    std::mt19937_64 random(seed_ + step);
    TestBatch batch(testing::RandomEntries(kShape, 3, random), kShape, 0, 4, 2, 1);
    auto prepared = *engine.Prepare(batch.view());
    std::normal_distribution<float> normal;
    std::vector<float> gradients(prepared->stacks()[0].samples.size() * kWidth);
    for (float& g : gradients) g = normal(random);
    ApplyInput input;
    input.stacks.push_back({0, gradients, {}});
    engine.Apply(prepared, input);
  }
  const std::vector<StackSpec>& stacks() const { return stacks_; }

 private:
  const uint64_t seed_;
  std::vector<StackSpec> stacks_;
};

// Every value of weights and slots, by partition and row.
std::vector<float> AllRows(TestEngine& engine, int first, int count) {
  std::vector<float> all;
  const StackSpec& stack = engine.spec().stacks[0];
  std::vector<std::pair<std::string, int>> arrays = {{"", kWidth}};
  for (const config::SlotInfo& slot : config::OptimizerSlots(stack.optimizer)) {
    arrays.emplace_back(slot.name, slot.one_per_row ? 1 : kWidth);
  }
  for (int p = first; p < first + count; ++p) {
    const std::vector<int32_t> partitions(kShape.rows_per_partition, p);
    std::vector<int64_t> rows(kShape.rows_per_partition);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
    for (const auto& [slot, columns] : arrays) {
      std::vector<float> values(rows.size() * columns);
      EXPECT_TRUE(engine
                      .Read({engine.spec().model_id, 0, slot, partitions, rows, columns},
                            absl::MakeSpan(values))
                      .ok());
      all.insert(all.end(), values.begin(), values.end());
    }
  }
  return all;
}

// What a snapshot gave, by partition: a row's bytes in each array.
using Saved = std::vector<std::map<int64_t, std::vector<std::vector<char>>>>;

void Add(const SnapshotRows& rows, Saved* saved) {
  int64_t count = 0;
  for (const SnapshotRows::Run& run : rows.runs) count += run.count;
  int64_t done = 0;
  for (const SnapshotRows::Run& run : rows.runs) {
    for (int64_t i = 0; i < run.count; ++i, ++done) {
      std::vector<std::vector<char>> row;
      for (const PooledArray<char>& array : rows.arrays) {
        const int64_t bytes = static_cast<int64_t>(array.size()) / count;
        row.emplace_back(array.data() + done * bytes, array.data() + (done + 1) * bytes);
      }
      (*saved)[rows.k][run.first + i] = std::move(row);
    }
  }
}

// Reads a snapshot to its end. No row comes twice, and none after its partition's end.
Saved ReadAll(Snapshot& snapshot) {
  Saved saved(4);
  std::vector<bool> ended(4);
  while (true) {
    auto rows = snapshot.Next();
    EXPECT_TRUE(rows.ok()) << rows.status();
    if (!rows.ok() || !rows->has_value()) break;
    EXPECT_FALSE(ended[(*rows)->k]);
    for (const SnapshotRows::Run& run : (*rows)->runs) {
      for (int64_t i = 0; i < run.count; ++i) {
        EXPECT_FALSE(saved[(*rows)->k].contains(run.first + i)) << run.first + i;
      }
    }
    if ((*rows)->runs.empty()) ended[(*rows)->k] = true;
    Add(**rows, &saved);
  }
  EXPECT_THAT(ended, ::testing::Each(true));
  return saved;
}

// The rows of a model made of what was saved, on shards of `count` partitions each.
std::vector<float> Restored(const Training& training, const Saved& saved, int count) {
  std::vector<float> all;
  for (int first = 0; first < 4; first += count) {
    TestEngine engine(training.stacks(), kShape, first, count, {.eager_bytes = 0});
    ModelSpec spec = engine.spec();
    spec.model_id = 8;
    auto model = *engine.engine().MakeModel(spec);
    StackStore& store = model->stack(0);
    for (int k = 0; k < count; ++k) {
      for (const auto& [row, arrays] : saved[first + k]) store.LoadWeights(k, row, arrays[0]);
      for (const auto& [row, arrays] : saved[first + k]) {
        for (size_t s = 1; s < arrays.size(); ++s) {
          const auto* values = reinterpret_cast<const float*>(arrays[s].data());
          store.LoadSlot(k, static_cast<int>(s) - 1, row, {values, arrays[s].size() / 4});
        }
      }
    }
    EXPECT_TRUE(engine.engine().AddModel(model).ok());
    for (int p = first; p < first + count; ++p) {
      const std::vector<int32_t> partitions(kShape.rows_per_partition, p);
      std::vector<int64_t> rows(kShape.rows_per_partition);
      for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
      const auto read = [&](const std::string& slot, int columns) {
        std::vector<float> values(rows.size() * columns);
        EXPECT_TRUE(
            engine.Read({8, 0, slot, partitions, rows, columns}, absl::MakeSpan(values)).ok());
        all.insert(all.end(), values.begin(), values.end());
      };
      read("", kWidth);
      for (const StackStore::Slot& slot : store.slots()) read(slot.info.name, slot.columns);
    }
  }
  return all;
}

struct Case {
  std::string optimizer;
  v1::DataType dtype;
  int64_t eager_bytes;
  int64_t copy_bytes;
};

class SnapshotTest : public ::testing::TestWithParam<Case> {};

TEST_P(SnapshotTest, IsTheRowsOfOneMomentWhileTrainingGoesOn) {
  const uint64_t seed = TestSeed();
  const Training training(GetParam().optimizer, GetParam().dtype, seed);
  const auto engine = training.Start(GetParam().eager_bytes);
  const auto twin = training.Start();
  int step = 0;
  Saved all(4);
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 5; ++i, ++step) training.Step(*engine, step);
    auto snapshot = *BeginSnapshot(
        engine->engine(), 7, {.changed_only = round > 0, .copy_bytes = GetParam().copy_bytes});
    std::thread trainer([&] {
      for (int i = 0; i < 6; ++i) training.Step(*engine, step + i);
    });
    const Saved saved = ReadAll(*snapshot);
    trainer.join();
    engine->engine().EndSnapshot(snapshot, /*kept=*/true);
    for (int p = 0; p < 4; ++p) {
      for (const auto& [row, arrays] : saved[p]) all[p][row] = arrays;
    }
    for (int i = round == 0 ? 0 : step - 5; i < step; ++i) training.Step(*twin, i);
    const std::vector<float> expected = AllRows(*twin, 0, 4);
    EXPECT_EQ(Restored(training, all, 4), expected) << "round " << round;
    EXPECT_EQ(Restored(training, all, 2), expected) << "round " << round;
    // The twin catches up.
    for (int i = 0; i < 6; ++i) training.Step(*twin, step + i);
    step += 6;
  }
}

INSTANTIATE_TEST_SUITE_P(All, SnapshotTest,
                         ::testing::Values(Case{"adagrad {}", v1::FLOAT32, 0, int64_t{1} << 30},
                                           Case{"adagrad {}", v1::FLOAT32, int64_t{1} << 30, 1},
                                           Case{"adam {}", v1::BFLOAT16, 0, 20000},
                                           Case{"rowwise_adagrad {}", v1::FLOAT16, 0,
                                                int64_t{1} << 30},
                                           Case{"sgd {}", v1::FLOAT32, 0, 1}));

TEST(SnapshotTest, OneThatWasNotKeptIsPartOfTheNext) {
  const Training training("sgd {}", v1::FLOAT32, 5);
  const auto engine = training.Start();
  training.Step(*engine, 0);
  const auto save = [&](bool changed_only, bool kept) {
    auto snapshot = *BeginSnapshot(engine->engine(), 7,
                                   {.changed_only = changed_only, .copy_bytes = int64_t{1} << 20});
    Saved saved = ReadAll(*snapshot);
    engine->engine().EndSnapshot(snapshot, kept);
    return saved;
  };
  Saved all = save(false, true);
  training.Step(*engine, 1);
  save(true, false);  // a full disk, say
  training.Step(*engine, 2);
  const Saved changed = save(true, true);
  for (int p = 0; p < 4; ++p) {
    EXPECT_LT(changed[p].size(), kShape.rows_per_partition);
    for (const auto& [row, arrays] : changed[p]) all[p][row] = arrays;
  }
  EXPECT_EQ(Restored(training, all, 4), AllRows(*engine, 0, 4));
  EXPECT_EQ(save(true, true), Saved(4)) << "nothing has changed since";
}

TEST(SnapshotTest, UntouchedRowsAreNotInIt) {
  const Training training("adagrad {}", v1::FLOAT32, 5);
  const auto engine = training.Start();
  engine->ReadRow(0, 2, 500, kWidth);  // touched, though not trained
  auto snapshot = *BeginSnapshot(engine->engine(), 7, {.copy_bytes = 1 << 20});
  training.Step(*engine, 0);  // touches more, after the moment
  Saved saved = ReadAll(*snapshot);
  engine->engine().EndSnapshot(snapshot, true);
  EXPECT_TRUE(saved[2].contains(500));
  // But for the rows that share a chunk with another partition's.
  for (const auto& partition : saved) {
    for (const auto& [row, arrays] : partition) {
      EXPECT_TRUE(row < 8 || row >= 992 || row / 16 == 500 / 16) << row;
    }
  }
}

// A second one would take the first one's place where writers look for it: rows would be missing.
TEST(SnapshotTest, OfOneModelOneAtATime) {
  const Training training("adagrad {}", v1::FLOAT32, 5);
  const auto engine = training.Start();
  training.Step(*engine, 0);
  auto snapshot = *BeginSnapshot(engine->engine(), 7, {.copy_bytes = 1 << 20});
  EXPECT_EQ(engine->engine().MakeSnapshot({7}, {}).status().code(), absl::StatusCode::kAborted);
  const std::vector<float> rows = AllRows(*engine, 0, 4);
  training.Step(*engine, 1);
  EXPECT_EQ(Restored(training, ReadAll(*snapshot), 4), rows);
  engine->engine().EndSnapshot(snapshot, /*kept=*/true);
  EXPECT_TRUE(engine->engine().MakeSnapshot({7}, {}).ok());
}

TEST(SnapshotTest, GivenUpItLetsWritersGo) {
  const Training training("adagrad {}", v1::FLOAT32, 5);
  const auto engine = training.Start();
  for (int step = 0; step < 3; ++step) training.Step(*engine, step);
  auto snapshot = *BeginSnapshot(engine->engine(), 7, {.copy_bytes = 1});
  std::thread trainer([&] { training.Step(*engine, 3); });  // waits for a reader that never comes
  absl::SleepFor(absl::Milliseconds(20));
  snapshot->Cancel();
  trainer.join();
  EXPECT_EQ(snapshot->Next().status().code(), absl::StatusCode::kCancelled);
  engine->engine().EndSnapshot(snapshot, false);
  training.Step(*engine, 4);
}

}  // namespace snapshot_test
}  // namespace emberd::shard
