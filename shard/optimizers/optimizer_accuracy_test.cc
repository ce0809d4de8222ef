// Every optimizer against its formula in double precision.
#include <cmath>

#include <gtest/gtest.h>

#include "config/optimizers.h"
#include "shard/testing/exact_optimizers.h"
#include "shard/testing/one_row.h"
#include "shard/testing/optimizer_cases.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace {

using testing::Exact;
using testing::ExactRow;
using testing::OptimizerCase;
using testing::RowValues;

constexpr int kColumns = 8;

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
  std::mt19937_64 random(testing::TestSeed());
  std::normal_distribution<float> normal;
  const v1::OptimizerConfig optimizer = testing::CompleteOptimizer(GetParam().text);
  double worst = 0;
  for (int trial = 0; trial < 100; ++trial) {
    RowValues row;
    row.w.resize(kColumns);
    for (float& w : row.w) w = normal(random);
    for (const config::SlotInfo& slot : config::OptimizerSlots(optimizer)) {
      row.slots.emplace_back(slot.one_per_row ? 1 : kColumns, slot.initial_value);
    }
    v1::OptimizerConfig step_optimizer = optimizer;
    const float rate = std::exp(normal(random) - 3);
    ASSERT_TRUE(config::SetHyperparameters(&step_optimizer, {{"learning_rate", rate}}).ok());
    for (int step = 0; step < 100; ++step) {
      // From tiny to large, now and then 0 or a whole row of 0.
      std::vector<float> g(kColumns);
      const float scale = step % 13 == 5 ? 0 : std::exp(2 * normal(random) - 2);
      for (float& x : g) x = random() % 7 == 0 ? 0 : scale * normal(random);
      ExactRow exact = ToExact(row);
      testing::ExactUpdate(step_optimizer, step, std::vector<Exact>(g.begin(), g.end()), exact);
      testing::KernelUpdate(MakeStepRule(step_optimizer, step), g, row);
      for (int c = 0; c < kColumns; ++c) {
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

}  // namespace
}  // namespace emberd::shard
