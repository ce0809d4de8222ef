#include "shard/update_rule.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "shard/portable_math.h"

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

AdamRule MakePlainAdam(float learning_rate, const v1::AdamConfig& adam) {
  AdamRule rule{learning_rate,         adam.beta1(), adam.beta2(), adam.epsilon(), 1,
                adam.sum_inside_sqrt()};
  if (rule.sum_inside_sqrt) rule.epsilon *= rule.epsilon;
  return rule;
}

// With bias correction: t = step + 1, c = sqrt(1 - beta2^t), rate = lr * c / (1 - beta1^t).
AdamRule MakeCorrectedAdam(float learning_rate, float beta1, float beta2, float epsilon,
                           int64_t step) {
  const double t = static_cast<double>(step) + 1;
  const double c = std::sqrt(1 - PortablePow(beta2, t));
  return {static_cast<float>(learning_rate * c / (1 - PortablePow(beta1, t))),
          beta1,
          beta2,
          static_cast<float>(epsilon * c),
          1,
          false};
}

LaPropRule MakeLaProp(float learning_rate, const v1::LaPropConfig& laprop, int64_t step) {
  const double beta1 = laprop.beta1();
  const double beta2 = laprop.beta2();
  const double s = static_cast<double>(step);
  const double decay = beta2 * (1 - PortablePow(beta2, s)) / (1 - PortablePow(beta2, s + 1));
  return {learning_rate, static_cast<float>(decay), laprop.beta1(),
          static_cast<float>(std::sqrt(1 - beta1 * beta1)), laprop.epsilon()};
}

UpdateRule MakeUpdateRule(const v1::OptimizerConfig& o, int64_t step) {
  const float lr = o.learning_rate();
  switch (o.kind_case()) {
    case v1::OptimizerConfig::kSgd:
      return SgdRule{lr};
    case v1::OptimizerConfig::kMomentum:
      return MomentumRule{lr, o.momentum().momentum(), o.momentum().use_nesterov()};
    case v1::OptimizerConfig::kRowwiseAdagrad:
      return RowwiseAdagradRule{lr, o.rowwise_adagrad().epsilon()};
    case v1::OptimizerConfig::kAdagradMomentum: {
      const v1::AdagradMomentumConfig& a = o.adagrad_momentum();
      return AdagradMomentumRule{lr,          a.momentum(), a.beta2(),
                                 a.epsilon(), a.exponent(), a.use_nesterov()};
    }
    case v1::OptimizerConfig::kAdam: {
      const v1::AdamConfig& a = o.adam();
      return a.bias_correction() ? MakeCorrectedAdam(lr, a.beta1(), a.beta2(), a.epsilon(), step)
                                 : MakePlainAdam(lr, a);
    }
    case v1::OptimizerConfig::kAdamw: {
      const v1::AdamWConfig& a = o.adamw();
      AdamRule rule = MakeCorrectedAdam(lr, a.beta1(), a.beta2(), a.epsilon(), step);
      rule.keep = 1 - lr * a.weight_decay();
      return rule;
    }
    case v1::OptimizerConfig::kFtrl: {
      const v1::FtrlConfig& f = o.ftrl();
      return FtrlRule{lr,       -f.learning_rate_power(),
                      f.l1(),   f.l2(),
                      f.beta(), f.multiply_linear_by_learning_rate()};
    }
    case v1::OptimizerConfig::kLaprop:
      return MakeLaProp(lr, o.laprop(), step);
    case v1::OptimizerConfig::kF2A: {
      const v1::F2aConfig& f = o.f2a();
      return F2aRule{lr,      static_cast<float>(std::max<int64_t>(step, 1)),
                     f.rho(), f.l1(),
                     f.l2(),  f.max_lr_multiplier()};
    }
    case v1::OptimizerConfig::kRmsprop: {
      const v1::RmsPropConfig& r = o.rmsprop();
      return RmsPropRule{lr, r.decay(), r.momentum(), r.epsilon()};
    }
    case v1::OptimizerConfig::kAdagrad:
    case v1::OptimizerConfig::KIND_NOT_SET:
      break;
  }
  return AdagradRule{lr};
}

}  // namespace

StepRule MakeStepRule(const v1::OptimizerConfig& optimizer, int64_t step) {
  return {MakeCommonRule(optimizer), MakeUpdateRule(optimizer, step)};
}

}  // namespace emberd::shard
