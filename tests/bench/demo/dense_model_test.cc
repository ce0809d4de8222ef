#include "tests/bench/demo/dense_model.h"

#include <cmath>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/bench/demo/click_log.h"
#include "tests/bench/demo/metrics.h"
#include "tests/bench/demo/plain_trainer.h"
#include "tests/bench/demo/random.h"

namespace emberd::demo {
namespace dense_model_test {

using testing::ElementsAre;
using testing::HasSubstr;

using Parts = std::vector<std::vector<float>>;

TEST(SumByTreeTest, AddsNeighboursFirst) {
  // From left to right the ones would be lost beside 1e8, one by one.
  EXPECT_THAT(SumByTree(Parts{{1e8f}, {0}, {4}, {4}}), testing::ElementsAre(1e8f + 8));
  EXPECT_THAT(SumByTree(Parts{{1e8f}, {4}, {4}, {0}}), testing::ElementsAre(1e8f));
}

TEST(SumByTreeTest, SumsOfHalvesGiveTheWhole) {
  Parts parts;
  for (int i = 0; i < 8; ++i) parts.push_back({1.0f / static_cast<float>(3 + i * i), 0.1f});
  for (size_t size = 4; size <= 8; ++size) {  // the last half may be short
    const Parts left(parts.begin(), parts.begin() + 4);
    const Parts right(parts.begin() + 4, parts.begin() + static_cast<ptrdiff_t>(size));
    EXPECT_EQ(SumByTree(Parts(parts.begin(), parts.begin() + static_cast<ptrdiff_t>(size))),
              SumByTree(Parts{SumByTree(left), SumByTree(right)}))
        << size;
  }
}

TEST(SumByTreeTest, LeavesOutWhatIsEmpty) {
  EXPECT_THAT(SumByTree(Parts{}), testing::IsEmpty());
  EXPECT_THAT(SumByTree(Parts{{}, {}}), testing::IsEmpty());
  EXPECT_THAT(SumByTree(Parts{{}, {2}, {3}, {}}), testing::ElementsAre(5));
}

Matrix RandomMatrix(int rows, int columns, uint64_t seed) {
  Matrix matrix(rows, columns);
  Draws draws(seed, 0, 0);
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) matrix(r, c) = static_cast<float>(draws.Normal());
  }
  return matrix;
}

double SumLoss(const Mlp& mlp, const Matrix& input, const std::vector<float>& labels) {
  Mlp::Activations forward;
  mlp.Forward(input, &forward);
  return LogLoss(forward.logits, labels) * static_cast<double>(labels.size());
}

// A wrong factor or a transposed product in the backward pass still trains, only worse: nothing but
// a comparison with finite differences finds it.
class MlpGradientTest : public testing::TestWithParam<std::vector<int>> {
 protected:
  MlpGradientTest() : mlp_(5, GetParam(), 11), input_(RandomMatrix(7, 5, 3)) {
    Mlp::Activations forward;
    mlp_.Forward(input_, &forward);
    parameter_gradients_ = Vector::Zero(mlp_.parameter_count());
    input_gradients_ =
        mlp_.Backward(forward, LogLossGradient(forward.logits, labels_), &parameter_gradients_);
  }

  // d/dx of the loss by central differences; x is a reference into mlp_ or input_.
  double Difference(float* x) {
    constexpr float kStep = 1e-2f;
    const float middle = *x;
    *x = middle + kStep;
    const double above = SumLoss(mlp_, input_, labels_);
    *x = middle - kStep;
    const double below = SumLoss(mlp_, input_, labels_);
    *x = middle;
    return (above - below) / (2 * kStep);
  }

  Mlp mlp_;
  Matrix input_;
  std::vector<float> labels_ = {1, 0, 0, 1, 1, 0, 1};
  Vector parameter_gradients_;
  Matrix input_gradients_;
};

TEST_P(MlpGradientTest, MatchesFiniteDifferences) {
  int kinks = 0;  // a step across ReLU's kink makes the difference meaningless, here and there
  const auto check = [&kinks](double gradient, double difference) {
    kinks += std::abs(gradient - difference) > 2e-3 * (1 + std::abs(difference));
  };
  for (int64_t i = 0; i < mlp_.parameter_count(); ++i) {
    check(parameter_gradients_[i], Difference(&mlp_.parameters()[i]));
  }
  for (int64_t i = 0; i < input_.size(); ++i)
    check(input_gradients_.data()[i], Difference(input_.data() + i));
  const int64_t checked = mlp_.parameter_count() + input_.size();
  EXPECT_LE(kinks, GetParam().empty() ? 0 : checked / 20);
}

INSTANTIATE_TEST_SUITE_P(Shapes, MlpGradientTest,
                         testing::Values(std::vector<int>{}, std::vector<int>{4},
                                         std::vector<int>{8, 6}));

TEST(MlpTest, BackwardAddsToTheGradients) {
  const Mlp mlp(3, {4}, 1);
  Mlp::Activations forward;
  mlp.Forward(RandomMatrix(2, 3, 1), &forward);
  Vector once = Vector::Zero(mlp.parameter_count()), twice = once;
  const Vector by_logits = Vector::Ones(2);
  mlp.Backward(forward, by_logits, &once);
  mlp.Backward(forward, by_logits, &twice);
  mlp.Backward(forward, by_logits, &twice);
  EXPECT_TRUE(twice.isApprox(2 * once));
}

TEST(MlpTest, SameSeedSameParameters) {
  EXPECT_EQ(Mlp(6, {4, 3}, 9).parameters(), Mlp(6, {4, 3}, 9).parameters());
  EXPECT_NE(Mlp(6, {4, 3}, 9).parameters(), Mlp(6, {4, 3}, 8).parameters());
  EXPECT_EQ(Mlp(6, {4, 3}, 9).parameter_count(), 6 * 4 + 4 + 4 * 3 + 3 + 3 + 1);
}

TEST(LogLossTest, IsStableFarFromZero) {
  Vector logits(4);
  logits << 200, -200, 200, -200;
  EXPECT_DOUBLE_EQ(LogLoss(logits, {1, 0, 0, 1}), 100.0);
  EXPECT_DOUBLE_EQ(LogLoss(Vector::Zero(2), {1, 0}), std::log(2.0));
  EXPECT_EQ(LogLoss(Vector(0), {}), 0.0);
}

TEST(DenseAdagradTest, FollowsTheFormula) {
  DenseAdagrad optimizer(2, 0.5f, 0.1f);
  Vector parameters(2), gradients(2);
  parameters << 1, 2;
  gradients << 3, 0;
  optimizer.Apply(gradients, &parameters);
  EXPECT_FLOAT_EQ(parameters[0], 1 - 0.5f * 3 / std::sqrt(9.1f));
  EXPECT_FLOAT_EQ(parameters[1], 2);
  const float before = parameters[0];
  optimizer.Apply(gradients, &parameters);
  EXPECT_FLOAT_EQ(parameters[0], before - 0.5f * 3 / std::sqrt(18.1f));
}

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

const std::vector<CurvePoint> kPoints = {{1000, 0.5, 0.69, 0.51, 0.52},
                                         {2000, 1.0, 0.6, 0.7, 0.72}};

size_t Count(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(CurveTest, Csv) {
  EXPECT_EQ(CurveCsv(kPoints),
            "examples,seconds,loss,auc,held_out_auc\n"
            "1000,0.500,0.690000,0.510000,0.520000\n"
            "2000,1.000,0.600000,0.700000,0.720000\n");
}

TEST(CurveTest, SvgIsWellFormedAndEscaped) {
  const std::string svg = CurveSvg("a < b & c", kPoints, 0.8, "best");
  EXPECT_THAT(svg, testing::StartsWith("<svg "));
  EXPECT_THAT(svg, testing::EndsWith("</svg>\n"));
  EXPECT_THAT(svg, HasSubstr("a &lt; b &amp; c"));
  EXPECT_THAT(svg, HasSubstr("best: 0.8000"));
  EXPECT_EQ(Count(svg, "<text"), Count(svg, "</text>"));
  EXPECT_EQ(Count(svg, "<polyline"), 2u);
}

TEST(CurveTest, SvgWithoutPoints) {
  EXPECT_THAT(CurveSvg("t", {}, 0.8, "best"), HasSubstr("</svg>"));
}

TEST(CurveTest, TicksAreRoundAndTheClimbIsCutOff) {
  std::vector<CurvePoint> points;
  for (int i = 0; i <= 20; ++i) {
    const double auc = i == 0 ? 0.5 : 0.78 + 0.001 * i;
    points.push_back({.examples = 100'000 * i, .auc = auc, .held_out_auc = auc});
  }
  const std::string svg = CurveSvg("t", points, 0.81, "best");
  for (const char* tick : {">0.780<", ">0.785<", ">0.810<", ">0 M<", ">0.5 M<", ">2 M<"}) {
    EXPECT_THAT(svg, HasSubstr(tick));
  }
  EXPECT_EQ(svg.find(">0.50<"), std::string::npos);
  EXPECT_THAT(svg, HasSubstr("clip-path"));
}

// The higher AUC must be higher up, that is at a smaller y, and the later point further to the
// right.
TEST(CurveTest, SvgHasTheRightWayUp) {
  const std::string svg = CurveSvg("t", kPoints, 0.8, "best");
  double x1, y1, x2, y2;
  const size_t at = svg.find("points=\"");
  ASSERT_EQ(std::sscanf(svg.c_str() + at, "points=\"%lf,%lf %lf,%lf", &x1, &y1, &x2, &y2), 4);
  EXPECT_LT(x1, x2);
  EXPECT_GT(y1, y2);
}

TEST(WriteFileTest, NamesThePathThatCannotBeWritten) {
  const absl::Status status = WriteFile("/no/such/directory/file", "x");
  EXPECT_THAT(std::string(status.message()), HasSubstr("/no/such/directory/file"));
}

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

}  // namespace dense_model_test
}  // namespace emberd::demo
