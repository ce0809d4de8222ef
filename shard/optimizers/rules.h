// What one step does to a row, as plain numbers: an OptimizerConfig with the step's
// hyper-parameters and step number worked in. Formulas: emberd/v1/model.proto.
//
// Where a formula divides by a root that is 0 (an accumulator that nothing was ever added to), the
// quotient counts as 0.
//
// Complements of decay rates, 1 - x, are fields of their own. For TensorFlow's forms
// (AdagradMomentum, Adam without bias correction) and RMSProp they are taken in double precision
// and rounded once: Adam meets the steps of tests/golden/tf/93 within 1e-6 only so. For JAX's forms
// (Adam with bias correction, AdamW, LaProp) x is rounded to float32 first and 1 - x is float32
// arithmetic: Adam's trace in tests/golden/jax/070.json starts with v = 9.99987e-06 for g = 0.1 and
// beta2 = 0.999.
//
// Accuracy. Let T be the value of a result's formula with every term replaced by its absolute value
// (so that cancellation is accounted for). A float32 update differs from the formula evaluated
// exactly on the same inputs (JAX's decay rates rounded to float32) by at most `bound` * 2^-24 * T,
// with the bound given at each rule (rules_test.cc measures at most four fifths of
// it), for T above 1e-30 and decay rates of at least 0.5. Clipping and decay add 2.
#pragma once

#include <cstdint>
#include <memory>
#include <variant>

namespace emberd::v1 {
class OptimizerConfig;
}
namespace emberd::config {
struct RuleProgram;
}

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
  float square_factor;  // 1 - beta2; 1 where beta2 is 1, and squares add up
  float epsilon;
  float exponent;
  bool nesterov;
};

// Adam in its three forms, and AdamW: w = w * keep - rate * m / d, where d = sqrt(v + epsilon) if
// sum_inside_sqrt, else sqrt(v) + epsilon.
struct AdamRule {  // bound 6
  float rate;
  float one_minus_beta1;
  float one_minus_beta2;
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
  float one_minus_decay;
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
  float one_minus_decay;
  float momentum;
  float epsilon;
};

// A user's own; where it divides by 0 the quotient is that of IEEE 754.
struct CustomRule {
  std::shared_ptr<const config::RuleProgram> program;
};

using UpdateRule =
    std::variant<SgdRule, MomentumRule, AdagradRule, RowwiseAdagradRule, AdagradMomentumRule,
                 AdamRule, FtrlRule, LaPropRule, F2aRule, RmsPropRule, CustomRule>;

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
