#include "client/demo/plain_trainer.h"

#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/demo/click_log.h"
#include "client/demo/metrics.h"

namespace emberd::demo {
namespace {

using testing::ElementsAre;

FeatureColumn Ragged() { return {.ids = {0, 2, 2, 1}, .row_splits = {0, 3, 3, 4}}; }

PlainTable Table(client::Combiner combiner) {
  PlainTable table(3, 2, combiner, 0.1f);
  table.weights() = {1, 10, 2, 20, 4, 40};
  return table;
}

TEST(PlainTableTest, Combines) {
  const float third = 1.0f / 3, root = 1.0f / std::sqrt(3.0f);
  const auto mean = Table(client::Combiner::kMean).Lookup(Ragged(), 3);
  EXPECT_THAT(mean,
              ElementsAre(testing::FloatEq(9 * third), testing::FloatEq(90 * third), 0, 0, 2, 20));
  const auto sum = Table(client::Combiner::kSum).Lookup(Ragged(), 3);
  EXPECT_THAT(sum, ElementsAre(9, 90, 0, 0, 2, 20));
  const auto sqrtn = Table(client::Combiner::kSqrtn).Lookup(Ragged(), 3);
  EXPECT_THAT(sqrtn,
              ElementsAre(testing::FloatEq(9 * root), testing::FloatEq(90 * root), 0, 0, 2, 20));
}

TEST(PlainTableTest, UpdatesEachRowOnceWithTheSumOfItsGradients) {
  PlainTable table = Table(client::Combiner::kSum);
  const std::vector<float> gradients = {1, 0, 5, 5, 3, 0};
  // In two batches, as of two trainers.
  table.Add({.ids = {0, 2, 2}, .row_splits = {0, 3, 3}}, 2,
            absl::MakeConstSpan(gradients).subspan(0, 4));
  table.Add({.ids = {1}, .row_splits = {}}, 1, absl::MakeConstSpan(gradients).subspan(4));
  table.Update(0.5f);
  EXPECT_THAT(table.weights(), ElementsAre(testing::FloatEq(1 - 0.5f * 1 / std::sqrt(1.1f)), 10,
                                           testing::FloatEq(2 - 0.5f * 3 / std::sqrt(9.1f)), 20,
                                           testing::FloatEq(4 - 0.5f * 2 / std::sqrt(4.1f)), 40));
}

TEST(ScheduleTest, CoversEveryExampleOnce) {
  const Schedule schedule{.examples = 1003, .batch_size = 100, .trainers = 3};
  std::vector<int> seen(1003);
  for (int64_t round = 0; round < schedule.Rounds(); ++round) {
    for (int rank = 0; rank < 3; ++rank) {
      const ExampleRange range = schedule.Range(round, rank);
      for (int64_t i = range.first; i < range.first + range.count; ++i) ++seen.at(i);
    }
  }
  EXPECT_THAT(seen, testing::Each(1));
}

// Round 1 of a pipelined schedule must see the tables as round 0 found them.
TEST(PlainTrainerTest, PipelinedRoundsSeeTheUpdatesUpToTheLastButOne) {
  const ClickLog log(1, 1000, 100);
  const auto logits_of = [&](bool pipelined, int64_t round) {
    PlainTrainer trainer(
        &log, Hyperparameters{.dense_learning_rate = 0},
        {.examples = 1000, .batch_size = 50, .trainers = 2, .pipelined = pipelined});
    std::vector<float> logits;
    // The same batch in every round, so that logits change by updates alone.
    for (int64_t i = 0; i <= round; ++i) {
      logits.clear();
      EXPECT_TRUE(trainer.Round(0, &logits, nullptr).ok());
    }
    return logits;
  };
  EXPECT_EQ(logits_of(true, 1), logits_of(true, 0));
  EXPECT_NE(logits_of(false, 1), logits_of(false, 0));
  EXPECT_EQ(logits_of(true, 2), logits_of(false, 1));
}

// The whole model at work: an optimizer with the wrong sign, labels that do not belong to their
// examples, or a feature that is not learned would all end here.
TEST(PlainTrainerTest, LearnsThePlantedClickLog) {
  constexpr int64_t kExamples = 80'000, kHeldOut = 10'000;
  const ClickLog log(1, kExamples, kHeldOut);
  PlainTrainer trainer(&log, Hyperparameters(),
                       {.examples = kExamples, .batch_size = 512, .trainers = 2});
  const absl::StatusOr<double> before = trainer.Evaluate(kHeldOut);
  ASSERT_TRUE(before.ok());
  for (int64_t round = 0; round < kExamples / 1024; ++round) {
    ASSERT_TRUE(trainer.Round(round, nullptr, nullptr).ok());
  }
  const absl::StatusOr<double> after = trainer.Evaluate(kHeldOut);
  ASSERT_TRUE(after.ok());
  Batch held_out;
  ASSERT_TRUE(log.ReadTest(0, kHeldOut, &held_out).ok());
  const double best = Auc(held_out.true_probability, held_out.labels);
  EXPECT_NEAR(*before, 0.5, 0.1);
  EXPECT_GT(*after, best - 0.05);
  EXPECT_LT(*after, best + 0.005) << "better than the truth: the truth is not the truth";
}

}  // namespace
}  // namespace emberd::demo
