// What one step does to a row, as plain numbers: an OptimizerConfig with the step's
// hyper-parameters and step number worked in. Formulas: emberd/v1/model.proto.
//
// Error bounds: one update in float32 against the formula evaluated exactly on the same float32
// inputs. They are relative to the sum of the absolute values of the terms that make up each
// result, in units of 2^-24:
//   sgd 4, adagrad 6 (see each rule; checked by optimizer_test.cc).
#pragma once

#include <cstdint>
#include <limits>
#include <variant>

#include "emberd/v1/model.pb.h"

namespace emberd::shard {

struct SgdRule {
  float learning_rate;
};
struct AdagradRule {
  float learning_rate;
};

using UpdateRule = std::variant<SgdRule, AdagradRule>;

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
