// Which number a decay rate becomes in an update: seen in the slots after one step.
#include "shard/optimizers/rules.h"

#include <cmath>

#include <gtest/gtest.h>

#include "base/testing/sanitized.h"
#include "config/optimizers.h"
#include "shard/testing/exact_optimizers.h"
#include "shard/testing/optimizer_cases.h"
#include "shard/testing/scalar_optimizers.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace rules_test {

using testing::Exact;
using testing::ExactRow;
using testing::OptimizerCase;
using testing::RowValues;

constexpr int kRuleColumns = 8;

// The gradient of step s is (s + 1) * `gradient`, in every column.
RowValues AfterSteps(const v1::OptimizerConfig& optimizer, int steps, float gradient) {
  RowValues row{std::vector<float>(kRuleColumns, 1.0f), {}};
  for (const config::SlotInfo& slot : config::OptimizerSlots(optimizer)) {
    row.slots.emplace_back(kRuleColumns, slot.initial_value);
  }
  for (int step = 0; step < steps; ++step) {
    const std::vector<float> g(kRuleColumns, static_cast<float>(step + 1) * gradient);
    testing::KernelUpdate(MakeStepRule(optimizer, step), g, row);
  }
  return row;
}

// With slots that start from 0 and a gradient of 1, a slot holds the complement after one step.
struct Complement {
  const char* optimizer;
  int slot;
  float expected;
};

const Complement kComplements[] = {
    // TensorFlow's forms and RMSProp: in double.
    {"adam { beta1: 0.999 }", 0, 0.001f},
    {"adam { beta2: 0.999 }", 1, 0.001f},
    {"adam { beta2: 0.999999999999 }", 1, 1e-12f},
    {"adagrad_momentum { beta2: 0.999 initial_accumulator: 0 }", 0, 0.001f},
    {"adagrad_momentum { beta2: 0.999999999999 initial_accumulator: 0 }", 0, 1e-12f},
    {"adagrad_momentum { beta2: 1 initial_accumulator: 0 }", 0, 1},
    {"rmsprop { decay: 0.999 }", 0, 0.001f},
    // JAX's: in float32.
    {"adam { beta1: 0.999 bias_correction: true }", 0, 1 - 0.999f},
    {"adam { beta2: 0.999 bias_correction: true }", 1, 1 - 0.999f},
    {"adamw { beta1: 0.999 }", 0, 1 - 0.999f},
    {"adamw { beta2: 0.999 }", 1, 1 - 0.999f},
    {"adamw { beta2: 0.999999999999 }", 1, 0x1p-24f},
};

TEST(UpdateRule, ComplementsAreThoseOfTheSystemThatTheFormFollows) {
  for (const Complement& row : kComplements) {
    const v1::OptimizerConfig optimizer = testing::CompleteOptimizer(row.optimizer);
    // 1 - 1e-12 in double is off by 2e-5 of 1e-12, at most.
    const float tolerance = row.expected < 1e-9f ? 1e-16f : 0;
    EXPECT_NEAR(AfterSteps(optimizer, 1, 1).slots[row.slot][0], row.expected, tolerance)
        << row.optimizer;
  }
}

// A double just below 1 is 1 as a float32; bias correction must not divide by 1 - 1.
TEST(UpdateRule, RatesThatRoundUpToOneKeepRowsFinite) {
  for (const char* text :
       {"adam { beta1: 0.999999999999 beta2: 0.999999999999 }",
        "adam { beta1: 0.999999999999 bias_correction: true }",
        "adam { beta2: 0.999999999999 bias_correction: true }",
        "adamw { beta1: 0.999999999999 beta2: 0.999999999999 }",
        "laprop { beta1: 0.999999999999 beta2: 0.999999999999 }",
        "rmsprop { decay: 0.999999999999 }", "adagrad_momentum { beta2: 0.999999999999 }"}) {
    const RowValues row = AfterSteps(testing::CompleteOptimizer(text), 3, 0.5f);
    EXPECT_TRUE(std::isfinite(row.w[0])) << text;
    for (const std::vector<float>& slot : row.slots) EXPECT_TRUE(std::isfinite(slot[0])) << text;
  }
}

// (0 + 1e-10)^(-1 / 0.2) is infinite in float32, and 0 times that would be NaN for good: a row
// whose gradient is zero, or not sent, stays where it is.
TEST(UpdateRule, AZeroGradientMovesNothingHoweverSmallTheExponent) {
  const v1::OptimizerConfig optimizer =
      testing::CompleteOptimizer("adagrad_momentum { exponent: 0.2 initial_accumulator: 0 }");
  const RowValues row = AfterSteps(optimizer, 2, 0);
  EXPECT_EQ(row.w, std::vector<float>(kRuleColumns, 1.0f));
  for (const std::vector<float>& slot : row.slots) {
    EXPECT_EQ(slot, std::vector<float>(kRuleColumns, 0.0f));
  }
}

// 0.01 / 1e-45 is infinite in float32, and 0 times that would be NaN for good.
TEST(UpdateRule, AZeroGradientMovesNothingHoweverSmallTheEpsilon) {
  for (const char* epsilon : {"0", "1e-45", "1e-41", "0.99e-30", "1e-30"}) {
    const v1::OptimizerConfig optimizer =
        testing::CompleteOptimizer(std::string("rowwise_adagrad { epsilon: ") + epsilon + " }");
    const RowValues row = AfterSteps(optimizer, 2, 0);
    EXPECT_EQ(row.w, std::vector<float>(kRuleColumns, 1.0f)) << epsilon;
    EXPECT_EQ(row.slots[0][0], 0) << epsilon;
  }
}

// Every field whose complement enters a formula, sent for a step and written in the config.
TEST(UpdateRule, ARateSentPerStepGivesTheBitsOfAConfiguredOne) {
  const struct {
    const char* kind;
    const char* field;
  } kFields[] = {{"adam", "beta1"},    {"adam", "beta2"},
                 {"adamw", "beta1"},   {"adamw", "beta2"},
                 {"laprop", "beta1"},  {"laprop", "beta2"},
                 {"rmsprop", "decay"}, {"adagrad_momentum", "beta2"}};
  for (const auto& [kind, field] : kFields) {
    const auto configured = [kind = kind, field = field](const std::string& rate) {
      return testing::CompleteOptimizer(std::string(kind) + " { " + field + ": " + rate + " }");
    };
    v1::OptimizerConfig sent = configured("0.5");
    ASSERT_TRUE(config::SetHyperparameters(&sent, {{field, 0.999}}).ok());
    const RowValues expected = AfterSteps(configured("0.999"), 3, 0.3f);
    const RowValues row = AfterSteps(sent, 3, 0.3f);
    EXPECT_EQ(row.w, expected.w) << kind << " " << field;
    EXPECT_EQ(row.slots, expected.slots) << kind << " " << field;
    EXPECT_NE(row.slots, AfterSteps(configured("0.5"), 3, 0.3f).slots) << kind << " " << field;
  }
}

// Every optimizer against its formula in double precision.

class OptimizerAccuracyTest : public ::testing::TestWithParam<OptimizerCase> {};

ExactRow ToExact(const RowValues& row) {
  ExactRow result;
  result.w.assign(row.w.begin(), row.w.end());
  for (const std::vector<float>& slot : row.slots)
    result.slots.emplace_back(slot.begin(), slot.end());
  return result;
}

// Error in units of 2^-24 * magnitude; 0 for values too small to matter.
double Error(float value, const Exact& exact) {
  if (!(exact.m > 1e-30)) return value == 0 || std::abs(value) <= 1e-30 ? 0 : 1e9;
  return std::abs(value - exact.v) / (exact.m * 0x1p-24);
}

// Prevents a wrong formula, a wrong default, a slot used for another, a step number off by one; and
// keeps the promise of rules.h about accuracy. Each step starts from the kernel's own float32
// state, so that the bound is that of one update.
TEST_P(OptimizerAccuracyTest, TenThousandStepsStayWithinTheBound) {
  std::mt19937_64 random(TestSeed());
  std::normal_distribution<float> normal;
  const v1::OptimizerConfig optimizer = testing::CompleteOptimizer(GetParam().text);
  const v1::OptimizerConfig formula = testing::CompleteOptimizer(testing::FormulaOf(GetParam()));
  double worst = 0;
  for (int trial = 0; trial < Rounds(100); ++trial) {
    RowValues row;
    row.w.resize(kRuleColumns);
    for (float& w : row.w) w = normal(random);
    for (const config::SlotInfo& slot : config::OptimizerSlots(optimizer)) {
      row.slots.emplace_back(slot.one_per_row ? 1 : kRuleColumns, slot.initial_value);
    }
    v1::OptimizerConfig step_optimizer = optimizer, step_formula = formula;
    const float rate = std::exp(normal(random) - 3);
    for (v1::OptimizerConfig* one : {&step_optimizer, &step_formula}) {
      ASSERT_TRUE(config::SetHyperparameters(one, {{"learning_rate", rate}}).ok());
    }
    for (int step = 0; step < 100; ++step) {
      // From tiny to large, now and then 0 or a whole row of 0.
      std::vector<float> g(kRuleColumns);
      const float scale = step % 13 == 5 ? 0 : std::exp(2 * normal(random) - 2);
      for (float& x : g) x = random() % 7 == 0 ? 0 : scale * normal(random);
      ExactRow exact = ToExact(row);
      testing::ExactUpdate(step_formula, step, std::vector<Exact>(g.begin(), g.end()), exact);
      testing::KernelUpdate(MakeStepRule(step_optimizer, step), g, row);
      for (int c = 0; c < kRuleColumns; ++c) {
        worst = std::max(worst, Error(row.w[c], exact.w[c]));
        ASSERT_LE(Error(row.w[c], exact.w[c]), GetParam().bound)
            << "trial " << trial << " step " << step << " g " << g[c] << " w " << row.w[c]
            << " exact " << exact.w[c].v;
      }
      for (size_t s = 0; s < row.slots.size(); ++s) {
        for (size_t c = 0; c < row.slots[s].size(); ++c) {
          worst = std::max(worst, Error(row.slots[s][c], exact.slots[s][c]));
          ASSERT_LE(Error(row.slots[s][c], exact.slots[s][c]), GetParam().bound)
              << "slot " << s << " trial " << trial << " step " << step;
        }
      }
    }
  }
  printf("%s: worst error %.2f of %.0f\n", GetParam().name.c_str(), worst, GetParam().bound);
}

INSTANTIATE_TEST_SUITE_P(Optimizers, OptimizerAccuracyTest,
                         ::testing::ValuesIn(testing::OptimizerCases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace rules_test
}  // namespace emberd::shard
