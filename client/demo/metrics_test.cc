#include "client/demo/metrics.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "client/demo/random.h"

namespace emberd::demo {
namespace {

TEST(AucTest, HandMadeCases) {
  EXPECT_DOUBLE_EQ(Auc({1, 2, 3, 4}, {0, 0, 1, 1}), 1.0);
  EXPECT_DOUBLE_EQ(Auc({4, 3, 2, 1}, {0, 0, 1, 1}), 0.0);
  EXPECT_DOUBLE_EQ(Auc({1, 3, 2, 4}, {0, 0, 1, 1}), 0.75);
  EXPECT_DOUBLE_EQ(Auc({5, 5, 5, 5}, {0, 1, 0, 1}), 0.5);
  EXPECT_DOUBLE_EQ(Auc({1, 2, 2, 3}, {0, 0, 1, 1}), 0.875);
}

TEST(AucTest, OneClassOnlyOrNothing) {
  EXPECT_DOUBLE_EQ(Auc({1, 2}, {1, 1}), 0.5);
  EXPECT_DOUBLE_EQ(Auc({1, 2}, {0, 0}), 0.5);
  EXPECT_DOUBLE_EQ(Auc({}, {}), 0.5);
}

TEST(AucTest, EqualsTheCountOfPairs) {
  Draws draws(2, 0, 0);
  std::vector<float> scores, labels;
  for (int i = 0; i < 400; ++i) {
    scores.push_back(static_cast<float>(draws.Below(50)));  // many ties
    labels.push_back(draws.Uniform() < 0.3 ? 1.0f : 0.0f);
  }
  double right = 0, pairs = 0;
  for (int i = 0; i < 400; ++i) {
    for (int j = 0; j < 400; ++j) {
      if (labels[i] != 1 || labels[j] != 0) continue;
      ++pairs;
      right += scores[i] > scores[j] ? 1.0 : scores[i] == scores[j] ? 0.5 : 0.0;
    }
  }
  EXPECT_NEAR(Auc(scores, labels), right / pairs, 1e-12);
}

TEST(RollingMetricsTest, ForgetsWhatIsOlderThanTheWindow) {
  RollingMetrics metrics(4);
  metrics.Add({9, 8, -9, -8}, {0, 0, 1, 1});
  EXPECT_DOUBLE_EQ(metrics.auc(), 0.0);
  metrics.Add({1, 2}, {0, 1});
  EXPECT_EQ(metrics.size(), 4);
  metrics.Add({-1, 3}, {0, 1});
  EXPECT_DOUBLE_EQ(metrics.auc(), 1.0);
  const double expected = (std::log1p(std::exp(1.0)) + std::log1p(std::exp(-2.0)) +
                           std::log1p(std::exp(-1.0)) + std::log1p(std::exp(-3.0))) /
                          4;
  EXPECT_NEAR(metrics.log_loss(), expected, 1e-12);
}

}  // namespace
}  // namespace emberd::demo
