#include "shard/optimizers/rules.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "emberd/v1/model.pb.h"
#include "shard/optimizers/custom_rule.h"
#include "shard/store/portable_numbers.h"

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

// As TensorFlow does: 1 - 0.999 is 0.001 to the last bit of a float32.
float Complement(double decay_rate) { return static_cast<float>(1 - decay_rate); }

// A decay rate as JAX takes it. One that would round up to 1 stays below it: bias correction and
// LaProp divide by 1 - x.
float JaxDecayRate(double decay_rate) {
  return std::min(static_cast<float>(decay_rate), std::nextafter(1.0f, 0.0f));
}

AdamRule MakePlainAdam(float learning_rate, const v1::AdamConfig& adam) {
  AdamRule rule{
      learning_rate,         Complement(adam.beta1()), Complement(adam.beta2()), adam.epsilon(), 1,
      adam.sum_inside_sqrt()};
  if (rule.sum_inside_sqrt) rule.epsilon *= rule.epsilon;
  return rule;
}

// With bias correction: t = step + 1, c = sqrt(1 - beta2^t), rate = lr * c / (1 - beta1^t).
template <typename Config>  // AdamConfig, AdamWConfig
AdamRule MakeCorrectedAdam(float learning_rate, const Config& adam, int64_t step) {
  const float beta1 = JaxDecayRate(adam.beta1());
  const float beta2 = JaxDecayRate(adam.beta2());
  const double t = static_cast<double>(step) + 1;
  const double c = std::sqrt(1 - PortablePow(beta2, t));
  return {static_cast<float>(learning_rate * c / (1 - PortablePow(beta1, t))),
          1 - beta1,
          1 - beta2,
          static_cast<float>(adam.epsilon() * c),
          1,
          false};
}

LaPropRule MakeLaProp(float learning_rate, const v1::LaPropConfig& laprop, int64_t step) {
  const double beta1 = JaxDecayRate(laprop.beta1());
  const double beta2 = JaxDecayRate(laprop.beta2());
  const double s = static_cast<double>(step);
  const float decay =
      static_cast<float>(beta2 * (1 - PortablePow(beta2, s)) / (1 - PortablePow(beta2, s + 1)));
  return {learning_rate,
          decay,
          1 - decay,
          static_cast<float>(beta1),
          static_cast<float>(std::sqrt(1 - beta1 * beta1)),
          laprop.epsilon()};
}

UpdateRule MakeUpdateRule(const v1::OptimizerConfig& o, int64_t step) {
  const float lr = o.learning_rate();
  switch (o.kind_case()) {
    case v1::OptimizerConfig::kSgd:
      return SgdRule{lr};
    case v1::OptimizerConfig::kMomentum:
      return MomentumRule{lr, o.momentum().momentum(), o.momentum().use_nesterov()};
    case v1::OptimizerConfig::kRowwiseAdagrad: {
      const float epsilon = o.rowwise_adagrad().epsilon();
      // One below 1e-30 changes no root but 0, and lr divided by it may be infinite.
      return RowwiseAdagradRule{lr, epsilon < 1e-30f ? 0 : epsilon};
    }
    case v1::OptimizerConfig::kAdagradMomentum: {
      const v1::AdagradMomentumConfig& a = o.adagrad_momentum();
      return AdagradMomentumRule{lr,
                                 a.momentum(),
                                 static_cast<float>(a.beta2()),
                                 a.beta2() == 1 ? 1 : Complement(a.beta2()),
                                 a.epsilon(),
                                 a.exponent(),
                                 a.use_nesterov()};
    }
    case v1::OptimizerConfig::kAdam: {
      const v1::AdamConfig& a = o.adam();
      return a.bias_correction() ? MakeCorrectedAdam(lr, a, step) : MakePlainAdam(lr, a);
    }
    case v1::OptimizerConfig::kAdamw: {
      const v1::AdamWConfig& a = o.adamw();
      AdamRule rule = MakeCorrectedAdam(lr, a, step);
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
    case v1::OptimizerConfig::kRmsprop:
      return RmsPropRule{lr, Complement(o.rmsprop().decay()), o.rmsprop().momentum(),
                         o.rmsprop().epsilon()};
    case v1::OptimizerConfig::kCustom:
      return CustomRule{MakeCustomProgram(o, step)};
    case v1::OptimizerConfig::kNone:  // CheckedPart lets no update come so far
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
