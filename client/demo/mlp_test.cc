#include "client/demo/mlp.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "client/demo/random.h"

namespace emberd::demo {
namespace {

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

}  // namespace
}  // namespace emberd::demo
