// What one step does to a row, as plain numbers: an OptimizerConfig with the step's
// hyper-parameters and step number worked in. Formulas: emberd/v1/model.proto.
//
// Where a formula divides by a root that is 0 (an accumulator that nothing was ever added to), the
// quotient counts as 0.
//
// Accuracy. Let T be the value of a result's formula with every term replaced by its absolute value
// (so that cancellation is accounted for). A float32 update differs from the formula evaluated
// exactly on the same float32 inputs by at most `bound` * 2^-24 * T, with the bound given at each
// rule (optimizer_accuracy_test.cc measures about half of it), for T above 1e-30 and decay rates of
// at least 0.5. Clipping and decay add 2.
#pragma once

#include <cstdint>
#include <variant>

#include "emberd/v1/model.pb.h"

namespace emberd::shard {

struct SgdRule {  // bound 2
  float learning_rate;
};

struct MomentumRule {  // bound 4
  float learning_rate;
  float momentum;
  bool nesterov;
};

struct AdagradRule {  // bound 4
  float learning_rate;
};

// bound 6 + columns / 16
struct RowwiseAdagradRule {
  float learning_rate;
  float epsilon;
};

struct AdagradMomentumRule {  // bound 6
  float learning_rate;
  float momentum;
  float beta2;
  float epsilon;
  float exponent;
  bool nesterov;
};

// Adam in its three forms, and AdamW: w = w * keep - rate * m / d, where d = sqrt(v + epsilon) if
// sum_inside_sqrt, else sqrt(v) + epsilon.
struct AdamRule {  // bound 6
  float rate;
  float beta1;
  float beta2;
  float epsilon;
  float keep;
  bool sum_inside_sqrt;
};

struct FtrlRule {  // bound 6
  float learning_rate;
  float power;  // -learning_rate_power
  float l1;
  float l2;
  float beta;
  bool multiply_linear;
};

// bound 4 + 0.5 / (1 - beta2), for the rounding of `decay`
struct LaPropRule {
  float learning_rate;
  float decay;
  float beta1;
  float gradient_factor;  // sqrt(1 - beta1^2)
  float epsilon;
};

struct F2aRule {  // bound 6
  float learning_rate;
  float step;  // max(step, 1)
  float rho;
  float l1;
  float l2;
  float max_lr_multiplier;
};

struct RmsPropRule {  // bound 6
  float learning_rate;
  float decay;
  float momentum;
  float epsilon;
};

using UpdateRule =
    std::variant<SgdRule, MomentumRule, AdagradRule, RowwiseAdagradRule, AdagradMomentumRule,
                 AdamRule, FtrlRule, LaPropRule, F2aRule, RmsPropRule>;

// What every optimizer does before and after its formula.
struct CommonRule {
  bool clip_gradient = false;
  float gradient_min = 0, gradient_max = 0;
  bool decay = false;
  float keep = 1;  // w *= keep
  bool clip_weight = false;
  float weight_min = 0, weight_max = 0;
};

struct StepRule {
  CommonRule common;
  UpdateRule rule;
};

// `optimizer` is complete and `step` >= 0 where OptimizerNeedsStep.
StepRule MakeStepRule(const v1::OptimizerConfig& optimizer, int64_t step);

}  // namespace emberd::shard
