// Twins of the optimizer kernels in plain float32 code: the same operations in the same order, one
// column at a time. What every SIMD target must equal bit by bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <variant>
#include <vector>

#include <gtest/gtest.h>

#include "config/rule_program.h"
#include "shard/store/portable_numbers.h"
#include "shard/update/update_kernel.h"

namespace emberd::shard::testing {

// The live columns of a row: weights, and slots in storage order (one value for one_per_row).
struct RowValues {
  std::vector<float> w;
  std::vector<std::vector<float>> slots;
};

inline float ClampOr(float x, float low, float high) { return x < low ? low : high < x ? high : x; }
inline float DivOrZero(float n, float d) { return d == 0 ? 0 : n / d; }
inline float Power(float x, double p) {
  if (p == 0.5) return std::sqrt(x);
  return p == 0 ? 1 : p == 1 ? x : static_cast<float>(PortablePow(x, p));
}

// One column. `a` and `b` are the column's slots in storage order.
struct ColumnStep {
  float g;
  float& w;
  float& a;
  float& b;

  void operator()(const SgdRule& r) const { w = w - r.learning_rate * g; }
  void operator()(const MomentumRule& r) const {
    a = r.momentum * a + g;
    w = w - r.learning_rate * (r.nesterov ? r.momentum * a + g : a);
  }
  void operator()(const AdagradRule& r) const {
    a = a + g * g;
    w = w - DivOrZero(r.learning_rate * g, std::sqrt(a));
  }
  void operator()(const RowwiseAdagradRule& r) const {  // learning_rate: that of the row
    w = w - r.learning_rate * g;
  }
  void operator()(const AdagradMomentumRule& r) const {
    a = r.beta2 * a + r.square_factor * (g * g);
    const float sum = a + r.epsilon;
    float u = r.exponent == 2 ? g / std::sqrt(sum) : g * Power(sum, -1.0 / r.exponent);
    if (r.exponent != 2 && g == 0) u = g;
    b = r.momentum * b + u;
    w = w - r.learning_rate * (r.nesterov ? r.momentum * b + u : b);
  }
  void operator()(const AdamRule& r) const {
    a = a + r.one_minus_beta1 * (g - a);
    b = b + r.one_minus_beta2 * (g * g - b);
    const float d = r.sum_inside_sqrt ? std::sqrt(b + r.epsilon) : std::sqrt(b) + r.epsilon;
    w = r.keep * w - DivOrZero(r.rate * a, d);
  }
  void operator()(const FtrlRule& r) const {
    const float old_power = Power(a, r.power);
    a = a + g * g;
    const float power = Power(a, r.power);
    const float pull = (power - old_power) * w;
    float bound = r.l1, denominator;
    if (r.multiply_linear) {
      b = b + (r.learning_rate * g - pull);
      bound *= r.learning_rate;
      denominator = (power + 2 * r.learning_rate * r.l2) + r.beta;
    } else {
      b = b + (g - pull / r.learning_rate);
      denominator = (power + r.beta) / r.learning_rate + 2 * r.l2;
    }
    w = DivOrZero(ClampOr(b, -bound, bound) - b, denominator);
  }
  void operator()(const LaPropRule& r) const {
    b = r.decay * b + r.one_minus_decay * (g * g + r.epsilon);
    a = r.beta1 * a + DivOrZero(r.gradient_factor * g, std::sqrt(b));
    w = w - r.learning_rate * a;
  }
  void operator()(const F2aRule& r) const {  // max_lr_multiplier: the row's factor
    a = a + g * g;
    const float sign = w > 0 ? 1.0f : w < 0 ? -1.0f : 0.0f;
    w = w - r.learning_rate *
                ((DivOrZero(g * r.max_lr_multiplier, std::sqrt(a)) + r.l1 * sign) + r.l2 * w);
  }
  void operator()(const RmsPropRule& r) const {
    a = a + r.one_minus_decay * (g * g - a);
    b = r.momentum * b + DivOrZero(r.learning_rate * g, std::sqrt(a + r.epsilon));
    w = w - b;
  }
  // The numbers of a step's program are there already; what is left has these operations.
  void operator()(const CustomRule& r) const {
    using config::RuleOp;
    std::vector<float> x;
    for (const config::RuleProgram::Node& n : r.program->nodes) {
      const auto at = [&](int node) { return x[node]; };
      switch (n.op) {
        case RuleOp::kGradient:
          x.push_back(g);
          break;
        case RuleOp::kWeight:
          x.push_back(w);
          break;
        case RuleOp::kSlot:
          x.push_back(n.a == 0 ? a : b);
          break;
        case RuleOp::kNumber:
          x.push_back(static_cast<float>(n.number));
          break;
        case RuleOp::kCopy:
          x.push_back(at(n.a));
          break;
        case RuleOp::kNegate:
          x.push_back(-at(n.a));
          break;
        case RuleOp::kSqrt:
          x.push_back(std::sqrt(at(n.a)));
          break;
        case RuleOp::kMin:
          x.push_back(std::min(at(n.b), at(n.a)));
          break;
        case RuleOp::kMax:
          x.push_back(std::max(at(n.b), at(n.a)));
          break;
        case RuleOp::kPower:
          x.push_back(static_cast<float>(PortablePow(at(n.a), at(n.b))));
          break;
        case RuleOp::kAdd:
          x.push_back(at(n.a) + at(n.b));
          break;
        case RuleOp::kSubtract:
          x.push_back(at(n.a) - at(n.b));
          break;
        case RuleOp::kMultiply:
          x.push_back(at(n.a) * at(n.b));
          break;
        case RuleOp::kDivide:
          x.push_back(at(n.a) / at(n.b));
          break;
        default:
          ADD_FAILURE() << "an operation that no case has: " << static_cast<int>(n.op);
      }
    }
    const std::vector<int>& results = r.program->results;
    w = x[results[0]];
    if (results.size() > 1) a = x[results[1]];
    if (results.size() > 2) b = x[results[2]];
  }
};

// What happens once for the whole row, before its columns.
inline UpdateRule BeginRow(UpdateRule rule, const std::vector<float>& g, RowValues& row) {
  if (auto* r = std::get_if<RowwiseAdagradRule>(&rule)) {
    float s[16] = {};
    for (size_t c = 0; c < g.size(); ++c) s[c % 16] = s[c % 16] + g[c] * g[c];
    for (int half = 8; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) s[i] = s[i] + s[i + half];
    }
    const float sum = s[0];
    row.slots[0][0] += sum / static_cast<float>(g.size());
    r->learning_rate = DivOrZero(r->learning_rate, std::sqrt(row.slots[0][0]) + r->epsilon);
  } else if (auto* r = std::get_if<F2aRule>(&rule)) {
    row.slots[1][0] += 1;
    const float f = static_cast<float>(PortablePow(r->step / row.slots[1][0], r->rho));
    r->max_lr_multiplier = std::min(f, r->max_lr_multiplier);
  }
  return rule;
}

inline void ScalarUpdate(const StepRule& step, std::vector<float> g, RowValues& row) {
  const CommonRule& common = step.common;
  for (float& x : g) {
    if (common.clip_gradient) x = ClampOr(x, common.gradient_min, common.gradient_max);
  }
  const UpdateRule rule = BeginRow(step.rule, g, row);
  float none = 0;
  for (size_t c = 0; c < g.size(); ++c) {
    const auto slot = [&](size_t i) -> float& {
      return i < row.slots.size() && row.slots[i].size() > 1 ? row.slots[i][c] : none;
    };
    if (common.decay) row.w[c] = row.w[c] * common.keep;
    std::visit(ColumnStep{g[c], row.w[c], slot(0), slot(1)}, rule);
    if (common.clip_weight) row.w[c] = ClampOr(row.w[c], common.weight_min, common.weight_max);
  }
}

// The kernel on one row. Updates `row` (all columns live; their number a multiple of 8) with
// gradient `g`, float32 storage.
inline void KernelUpdate(const StepRule& rule, const std::vector<float>& g, RowValues& row) {
  const int width = static_cast<int>(g.size());
  std::vector<Touch> touches(1 + kTouchPadding);
  touches[0] = {0, 0, 1.0f};
  const RowRange range{0, 1, width, 0};
  UpdateArgs args;
  args.touches = touches.data();
  args.touch_count = 1;
  args.gradients = g.data();
  args.width = width;
  args.ranges = absl::MakeSpan(&range, 1);
  args.weights = reinterpret_cast<char*>(row.w.data());
  for (size_t s = 0; s < row.slots.size(); ++s) args.slots[s] = row.slots[s].data();
  UpdateRows(args, rule);
}

}  // namespace emberd::shard::testing
