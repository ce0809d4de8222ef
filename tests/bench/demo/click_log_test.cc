#include "tests/bench/demo/click_log.h"

#include <cmath>
#include <set>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tests/bench/demo/metrics.h"
#include "tests/bench/demo/random.h"

namespace emberd::demo {
namespace click_log_test {

TEST(DrawsTest, DependOnTheirKeyAlone) {
  Draws first(1, 2, 3);
  const uint64_t bits = first.Bits();
  Draws(1, 2, 4).Bits();
  EXPECT_EQ(Draws(1, 2, 3).Bits(), bits);
  EXPECT_NE(Draws(1, 2, 4).Bits(), bits);
  EXPECT_NE(Draws(1, 3, 3).Bits(), bits);
  EXPECT_NE(Draws(2, 2, 3).Bits(), bits);
}

TEST(DrawsTest, NormalHasMeanZeroAndVarianceOne) {
  double sum = 0, squares = 0;
  constexpr int kCount = 200'000;
  for (int i = 0; i < kCount; ++i) {
    const double x = Draws(7, i, 0).Normal();
    sum += x;
    squares += x * x;
  }
  // Five standard errors; the draws are fixed, so this cannot flicker.
  EXPECT_NEAR(sum / kCount, 0, 5 / std::sqrt(kCount));
  EXPECT_NEAR(squares / kCount, 1, 5 * std::sqrt(2.0 / kCount));
}

TEST(DrawsTest, BelowReachesEveryValueEquallyOften) {
  int counts[7] = {};
  Draws draws(1, 1, 1);
  for (int i = 0; i < 70'000; ++i) ++counts[draws.Below(7)];
  for (int count : counts) EXPECT_NEAR(count, 10'000, 500);
}

class PermuteTest : public testing::TestWithParam<int64_t> {};

TEST_P(PermuteTest, IsABijection) {
  const int64_t size = GetParam();
  std::set<int64_t> seen;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t place = Permute(i, size, 42);
    ASSERT_GE(place, 0);
    ASSERT_LT(place, size);
    seen.insert(place);
  }
  EXPECT_EQ(static_cast<int64_t>(seen.size()), size);
}

INSTANTIATE_TEST_SUITE_P(Sizes, PermuteTest, testing::Values(1, 2, 3, 4, 5, 17, 64, 1000, 4097));

TEST(PermuteTest, DependsOnTheKeyAndLeavesFewInPlace) {
  int moved = 0, differs = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    moved += Permute(i, 1000, 1) != i;
    differs += Permute(i, 1000, 1) != Permute(i, 1000, 2);
  }
  EXPECT_GT(moved, 980);
  EXPECT_GT(differs, 980);
}

class ZipfTest : public testing::TestWithParam<std::tuple<int64_t, double>> {};

// Would catch a wrong acceptance rule, which bends the frequencies of the first ranks without
// breaking anything else: each is compared with the exact law.
TEST_P(ZipfTest, FrequenciesFollowTheLaw) {
  const auto [size, exponent] = GetParam();
  const ZipfDistribution zipf(size, exponent);
  double total = 0;
  for (int64_t k = 1; k <= size; ++k) total += std::pow(static_cast<double>(k), -exponent);
  constexpr int kDraws = 300'000;
  std::vector<int> counts(size + 1);
  Draws draws(5, 0, 0);
  for (int i = 0; i < kDraws; ++i) {
    const int64_t rank = zipf.Sample(&draws);
    ASSERT_GE(rank, 1);
    ASSERT_LE(rank, size);
    ++counts[rank];
  }
  int64_t tail = 0;
  for (int64_t k = 1; k <= size; ++k) {
    const double expected = kDraws * std::pow(static_cast<double>(k), -exponent) / total;
    if (k <= 10) {
      EXPECT_NEAR(counts[k], expected, 5 * std::sqrt(expected)) << "rank " << k;
    }
    if (k > size / 2) tail += counts[k];
  }
  double expected_tail = 0;
  for (int64_t k = size / 2 + 1; k <= size; ++k) {
    expected_tail += kDraws * std::pow(static_cast<double>(k), -exponent) / total;
  }
  EXPECT_NEAR(tail, expected_tail, 5 * std::sqrt(expected_tail) + 1);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ZipfTest,
                         testing::Values(std::tuple(int64_t{1}, 1.1), std::tuple(int64_t{2}, 1.1),
                                         std::tuple(int64_t{3}, 0.5),
                                         std::tuple(int64_t{100}, 1.05),
                                         std::tuple(int64_t{1'000'000}, 1.05)));

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

}  // namespace click_log_test
}  // namespace emberd::demo
