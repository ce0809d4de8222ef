#include "client/demo/click_log.h"

#include <set>

#include <gtest/gtest.h>

#include "client/demo/metrics.h"

namespace emberd::demo {
namespace {

bool Same(const Batch& a, const Batch& b) {
  if (a.size != b.size || a.labels != b.labels || a.numeric != b.numeric) return false;
  for (size_t f = 0; f < a.features.size(); ++f) {
    if (a.features[f].ids != b.features[f].ids ||
        a.features[f].row_splits != b.features[f].row_splits) {
      return false;
    }
  }
  return a.true_probability == b.true_probability;
}

TEST(ClickLogTest, SameSeedSameExamplesInAnyProcess) {
  const ClickLog first(3, 1000, 100), second(3, 1000, 100), other(4, 1000, 100);
  Batch a, b, c;
  ASSERT_TRUE(first.ReadTrain(500, 64, &a).ok());
  ASSERT_TRUE(second.ReadTrain(500, 64, &b).ok());
  ASSERT_TRUE(other.ReadTrain(500, 64, &c).ok());
  EXPECT_TRUE(Same(a, b));
  EXPECT_FALSE(Same(a, c));
}

// Trainers read disjoint ranges in any order: an example must not depend on where a batch begins.
TEST(ClickLogTest, AnExampleDoesNotDependOnItsBatch) {
  const ClickLog log(3, 1000, 100);
  Batch whole, part;
  ASSERT_TRUE(log.ReadTrain(10, 20, &whole).ok());
  ASSERT_TRUE(log.ReadTrain(15, 1, &part).ok());
  EXPECT_EQ(part.labels[0], whole.labels[5]);
  EXPECT_EQ(part.true_probability[0], whole.true_probability[5]);
  for (size_t f = 0; f < part.features.size(); ++f) {
    EXPECT_EQ(part.features[f].IdsOf(0), whole.features[f].IdsOf(5)) << "feature " << f;
  }
}

TEST(ClickLogTest, HasTheShapeOfCriteo) {
  const ClickLog log(1, 1000, 100);
  const DatasetInfo& info = log.info();
  EXPECT_EQ(info.numeric_count, 13);
  ASSERT_EQ(info.features.size(), 26u);
  Batch batch;
  ASSERT_TRUE(log.ReadTrain(0, 2000, &batch).ok());
  int large = 0, several = 0;
  for (size_t f = 0; f < info.features.size(); ++f) {
    large += info.features[f].vocabulary_size == 1'000'000;
    several += batch.features[f].ids.size() > 2000;
    for (int64_t i = 0; i < batch.size; ++i) {
      ASSERT_FALSE(batch.features[f].IdsOf(i).empty());
      for (int32_t id : batch.features[f].IdsOf(i)) {
        ASSERT_GE(id, 0);
        ASSERT_LT(id, info.features[f].vocabulary_size);
      }
    }
  }
  EXPECT_GE(large, 2);
  EXPECT_GE(several, 2);
}

// The printed optimum stands and falls with this: the label must be drawn with exactly the stated
// probability.
TEST(ClickLogTest, LabelsAreDrawnWithTheStatedProbability) {
  const ClickLog log(1, 1000, 50'000);
  Batch batch;
  ASSERT_TRUE(log.ReadTest(0, 50'000, &batch).ok());
  double clicks[10] = {}, expected[10] = {}, count[10] = {};
  for (int64_t i = 0; i < batch.size; ++i) {
    const int bin = std::min(9, static_cast<int>(batch.true_probability[i] * 10));
    clicks[bin] += batch.labels[i];
    expected[bin] += batch.true_probability[i];
    ++count[bin];
  }
  for (int bin = 0; bin < 10; ++bin) {
    EXPECT_NEAR(clicks[bin], expected[bin],
                5 * std::sqrt(expected[bin] * (1 - expected[bin] / (count[bin] + 1)) + 1));
  }
}

TEST(ClickLogTest, BestAucIsInAUsefulRangeForEverySeed) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    const ClickLog log(seed, 1000, 20'000);
    Batch batch;
    ASSERT_TRUE(log.ReadTest(0, 20'000, &batch).ok());
    const double best = Auc(batch.true_probability, batch.labels);
    EXPECT_GT(best, 0.75) << "seed " << seed;
    EXPECT_LT(best, 0.88) << "seed " << seed;
  }
}

TEST(ClickLogTest, TokensAreDistinct) {
  std::set<std::string> tokens;
  for (int column = 0; column < kCriteoColumns; ++column) {
    for (int32_t id = 0; id < 2000; ++id) {
      const std::string token = ClickLog::Token(column, id);
      ASSERT_EQ(token.size(), 8u);
      tokens.insert(token);
    }
  }
  EXPECT_EQ(tokens.size(), 26u * 2000u);
}

TEST(ClickLogTest, RefusesHeldOutExamplesThatAreNotThere) {
  Batch batch;
  EXPECT_EQ(ClickLog(1, 10, 10).ReadTest(5, 6, &batch).code(), absl::StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace emberd::demo
