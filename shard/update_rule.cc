#include "shard/update_rule.h"

namespace emberd::shard {
namespace {

CommonRule MakeCommonRule(const v1::OptimizerConfig& o) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  CommonRule rule;
  rule.clip_gradient = o.has_clip_gradient_min() || o.has_clip_gradient_max();
  rule.gradient_min = o.has_clip_gradient_min() ? o.clip_gradient_min() : -kInfinity;
  rule.gradient_max = o.has_clip_gradient_max() ? o.clip_gradient_max() : kInfinity;
  float decay = o.weight_decay_factor();
  if (o.multiply_weight_decay_factor_by_learning_rate()) decay *= o.learning_rate();
  rule.decay = decay != 0;
  rule.keep = 1 - decay;
  rule.clip_weight = o.has_clip_weight_min() || o.has_clip_weight_max();
  rule.weight_min = o.has_clip_weight_min() ? o.clip_weight_min() : -kInfinity;
  rule.weight_max = o.has_clip_weight_max() ? o.clip_weight_max() : kInfinity;
  return rule;
}

}  // namespace

StepRule MakeStepRule(const v1::OptimizerConfig& o, int64_t step) {
  StepRule result;
  result.common = MakeCommonRule(o);
  switch (o.kind_case()) {
    case v1::OptimizerConfig::kSgd:
      result.rule = SgdRule{o.learning_rate()};
      break;
    default:
      result.rule = AdagradRule{o.learning_rate()};
      break;
  }
  return result;
}

}  // namespace emberd::shard
