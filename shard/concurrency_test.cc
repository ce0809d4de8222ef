// Lookups, updates, reads and assigns at once, from several threads. Prevents: a read that sees
// half of an update; updates that run beside one another on a row; memory freed under a running
// request. Made for ThreadSanitizer, which sees what the assertions cannot.
#include <thread>

#include <gtest/gtest.h>

#include "shard/testing/optimizer_cases.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace concurrency_test {

using testing::TestBatch;
using testing::TestEngine;
using testing::TestEntry;
using testing::TestShape;

const TestShape kShape{4, 16, 24};
constexpr int kWidth = 24, kRounds = 60;

// Each operation sets or moves all columns of a row by the same amount, so a row is whole if and
// only if its columns are equal.
bool Whole(const float* row) {
  return std::all_of(row, row + kWidth, [&](float x) { return x == row[0]; });
}

class ConcurrencyTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    StackSpec stack =
        OneTableStack(kShape, kWidth, kWidth, testing::CompleteOptimizer("adagrad {}"));
    stack.tables[0].initializer.mutable_row_id();
    engine_ =
        std::make_unique<TestEngine>(std::vector<StackSpec>{stack, stack}, kShape, 0, 4,
                                     EngineOptions{.eager_bytes = GetParam() ? 0 : 1 << 20}, 3);
  }

  std::vector<TestEntry> Entries(std::mt19937_64& random) {
    std::vector<TestEntry> entries = testing::RandomEntries(kShape, 3, random);
    for (TestEntry& entry : entries) entry.gain = 1;
    return entries;
  }

  // Steps of a group of two ranks.
  void TrainAsGroup(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int round = 0; round < kRounds; ++round) {
      std::vector<testing::RankInput> parts;
      std::vector<std::vector<float>> gradients(2);
      for (int rank = 0; rank < 2; ++rank) {
        TestBatch test_batch(Entries(random), kShape, 0, 4, 2, 1, 2, round % 2);
        const auto batch = *engine_->Prepare(test_batch.view());
        const StackSums sums = engine_->Gather(batch)[0];
        for (size_t i = 0; i < sums.samples.size(); ++i) {
          ASSERT_TRUE(Whole(sums.sums.data() + i * kWidth));
          gradients[rank].insert(gradients[rank].end(), kWidth,
                                 static_cast<float>(random() % 100) - 50);
        }
        parts.push_back({batch, {}});
        parts.back().input.stacks.push_back({round % 2, gradients[rank], {}});
      }
      engine_->ApplyParts(parts);
    }
  }

  void Train(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int round = 0; round < kRounds; ++round) {
      const int stack = static_cast<int>(random() % 2);
      TestBatch test_batch(Entries(random), kShape, 0, 4, 2, 1, 2, stack);
      const auto batch = *engine_->Prepare(test_batch.view());
      const StackSums sums = engine_->Gather(batch)[0];
      std::vector<float> gradients(sums.samples.size() * kWidth);
      for (size_t i = 0; i < sums.samples.size(); ++i) {
        ASSERT_TRUE(Whole(sums.sums.data() + i * kWidth));
        std::fill_n(gradients.data() + i * kWidth, kWidth, static_cast<float>(random() % 100) - 50);
      }
      ApplyInput input;
      input.stacks.push_back({stack, gradients, {}});
      engine_->Apply(batch, input);
    }
  }

  void ReadAndAssign(uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<int32_t> partitions;
    std::vector<int64_t> rows;
    for (int i = 0; i < 64; ++i) {
      partitions.push_back(i % 4);
      rows.push_back(i / 4);
    }
    std::vector<float> values(64 * kWidth);
    for (int round = 0; round < kRounds; ++round) {
      const int stack = static_cast<int>(random() % 2);
      RowSelection selection{7, stack, "", partitions, rows, kWidth};
      if (round % 4 == 0) {
        for (int i = 0; i < 64; ++i) {
          std::fill_n(values.data() + i * kWidth, kWidth, static_cast<float>(random() % 1000));
        }
        ASSERT_TRUE(engine_->Assign(selection, values).ok());
      } else {
        if (round % 4 == 1) selection.slot = "accumulator";
        ASSERT_TRUE(engine_->Read(selection, absl::MakeSpan(values)).ok());
        for (int i = 0; i < 64; ++i) ASSERT_TRUE(Whole(values.data() + i * kWidth));
      }
      engine_->engine().Statistics();
    }
  }

  std::unique_ptr<TestEngine> engine_;
};

TEST_P(ConcurrencyTest, RowsAreNeverSeenHalfUpdated) {
  const uint64_t seed = TestSeed();
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back([&, i] { Train(seed + i); });
  for (int i = 0; i < 2; ++i) threads.emplace_back([&, i] { TrainAsGroup(seed + 20 + i); });
  for (int i = 0; i < 2; ++i) threads.emplace_back([&, i] { ReadAndAssign(seed + 10 + i); });
  for (std::thread& thread : threads) thread.join();
}

TEST_P(ConcurrencyTest, ModelMayBeDroppedUnderRunningRequests) {
  std::mt19937_64 random(TestSeed());
  TestBatch test_batch(Entries(random), kShape, 0, 4, 2, 1);
  const auto batch = *engine_->Prepare(test_batch.view());
  const StagedUpdate update = *testing::Stage({{batch, {}}});
  std::atomic<int> answers{0};
  for (int i = 0; i < 50; ++i) {
    engine_->engine().Apply(update, [&](absl::StatusOr<ApplyResult> rows) {
      EXPECT_TRUE(rows.ok() || rows.status().code() == absl::StatusCode::kNotFound);
      ++answers;
    });
    engine_->engine().Gather(batch, {}, [&](absl::StatusOr<GatherOutput> sums) {
      EXPECT_TRUE(sums.ok() || sums.status().code() == absl::StatusCode::kNotFound);
      ++answers;
    });
    if (i == 25) {
      EXPECT_TRUE(engine_->engine().DropModel(7).ok());
    }
  }
  engine_.reset();  // waits
  EXPECT_EQ(answers, 100);
}

INSTANTIATE_TEST_SUITE_P(LazyAndEager, ConcurrencyTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Lazy" : "Eager"; });

}  // namespace concurrency_test
}  // namespace emberd::shard
