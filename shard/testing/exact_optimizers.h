// The formulas of emberd/v1/model.proto in double precision, straight from an OptimizerConfig. Each
// value carries its formula's value with all terms made positive, to which error bounds refer.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "emberd/v1/model.pb.h"

namespace emberd::shard::testing {

struct Exact {
  double v = 0;
  double m = 0;  // magnitude: >= |v|
  Exact() = default;
  Exact(double value) : v(value), m(std::abs(value)) {}
  Exact(double value, double magnitude) : v(value), m(magnitude) {}
};
inline Exact operator+(Exact a, Exact b) { return {a.v + b.v, a.m + b.m}; }
inline Exact operator-(Exact a, Exact b) { return {a.v - b.v, a.m + b.m}; }
inline Exact operator*(Exact a, Exact b) { return {a.v * b.v, a.m * b.m}; }
inline Exact operator/(Exact a, Exact b) {
  if (b.v == 0) return {0, 0};
  return {a.v / b.v, a.m / std::abs(b.v) * (b.m / std::abs(b.v))};
}
inline Exact Sqrt(Exact a) {
  return a.v == 0 ? Exact() : Exact(std::sqrt(a.v), a.m / std::sqrt(a.v));
}
inline Exact Pow(Exact a, double p) {
  const double v = std::pow(a.v, p);
  return {v, v * std::max(1.0, a.m / a.v)};
}
inline Exact Clamp(Exact x, double low, double high) {
  const double v = std::min(std::max(x.v, low), high);
  return {v, std::max(x.m, std::abs(v))};
}

// JAX's forms take decay rates that are rounded to float32.
inline double JaxRate(double decay_rate) { return static_cast<float>(decay_rate); }

// One row; rows of one_per_row slots have one value. Updates in place.
struct ExactRow {
  std::vector<Exact> w;
  std::vector<std::vector<Exact>> slots;
};

// One column after clipping and decay, before the weight clip.
inline void ExactColumn(const v1::OptimizerConfig& o, double step, Exact g, Exact& w, Exact& a,
                        Exact& b, Exact row_value) {
  const double lr = o.learning_rate();
  switch (o.kind_case()) {
    case v1::OptimizerConfig::kSgd:
      w = w - lr * g;
      return;
    case v1::OptimizerConfig::kMomentum: {
      const double k = o.momentum().momentum();
      a = k * a + g;
      w = w - lr * (o.momentum().use_nesterov() ? k * a + g : a);
      return;
    }
    case v1::OptimizerConfig::kAdagrad:
      a = a + g * g;
      w = w - lr * g / Sqrt(a);
      return;
    case v1::OptimizerConfig::kRowwiseAdagrad:
      w = w - lr * g / (Sqrt(row_value) + o.rowwise_adagrad().epsilon());
      return;
    case v1::OptimizerConfig::kAdagradMomentum: {
      const v1::AdagradMomentumConfig& c = o.adagrad_momentum();
      const double beta2 = c.beta2(), k = c.momentum();
      a = beta2 == 1 ? a + g * g : beta2 * a + (1 - beta2) * (g * g);
      const Exact u = g * Pow(a + c.epsilon(), -1.0 / c.exponent());
      b = k * b + u;
      w = w - lr * (c.use_nesterov() ? k * b + u : b);
      return;
    }
    case v1::OptimizerConfig::kAdam: {
      const v1::AdamConfig& c = o.adam();
      const bool jax = c.bias_correction();
      const double beta1 = jax ? JaxRate(c.beta1()) : c.beta1();
      const double beta2 = jax ? JaxRate(c.beta2()) : c.beta2();
      const double epsilon = c.epsilon(), t = step + 1;
      a = a + (1 - beta1) * (g - a);
      b = b + (1 - beta2) * (g * g - b);
      if (jax) {
        const double correct = std::sqrt(1 - std::pow(beta2, t));
        w = w - lr * correct / (1 - std::pow(beta1, t)) * a / (Sqrt(b) + epsilon * correct);
      } else {
        w = w - lr * a / (c.sum_inside_sqrt() ? Sqrt(b + epsilon * epsilon) : Sqrt(b) + epsilon);
      }
      return;
    }
    case v1::OptimizerConfig::kAdamw: {
      const v1::AdamWConfig& c = o.adamw();
      const double beta1 = JaxRate(c.beta1()), beta2 = JaxRate(c.beta2()), t = step + 1;
      const double correct = std::sqrt(1 - std::pow(beta2, t));
      w = w - lr * c.weight_decay() * w;
      a = a + (1 - beta1) * (g - a);
      b = b + (1 - beta2) * (g * g - b);
      w = w - lr * correct / (1 - std::pow(beta1, t)) * a / (Sqrt(b) + c.epsilon() * correct);
      return;
    }
    case v1::OptimizerConfig::kFtrl: {
      const v1::FtrlConfig& c = o.ftrl();
      const double p = -static_cast<double>(c.learning_rate_power());
      const double l1 = c.l1(), l2 = c.l2();
      const Exact old_power = Pow(a, p);
      a = a + g * g;
      const Exact power = Pow(a, p);
      const Exact d = power - old_power;
      if (c.multiply_linear_by_learning_rate()) {
        b = b + lr * g - d * w;
        w = (Clamp(b, -l1 * lr, l1 * lr) - b) / (power + 2 * lr * l2 + c.beta());
      } else {
        b = b + g - d * w / lr;
        w = (Clamp(b, -l1, l1) - b) / ((power + c.beta()) / lr + 2 * l2);
      }
      return;
    }
    case v1::OptimizerConfig::kLaprop: {
      const v1::LaPropConfig& c = o.laprop();
      const double beta1 = JaxRate(c.beta1()), beta2 = JaxRate(c.beta2());
      const double decay = beta2 * (1 - std::pow(beta2, step)) / (1 - std::pow(beta2, step + 1));
      b = decay * b + (1 - decay) * (g * g + c.epsilon());
      a = beta1 * a + std::sqrt(1 - beta1 * beta1) * g / Sqrt(b);
      w = w - lr * a;
      return;
    }
    case v1::OptimizerConfig::kF2A: {
      const v1::F2aConfig& c = o.f2a();
      const double f = std::min(std::pow(std::max(step, 1.0) / row_value.v, double{c.rho()}),
                                double{c.max_lr_multiplier()});
      a = a + g * g;
      const double sign = w.v > 0 ? 1 : w.v < 0 ? -1 : 0;
      w = w - lr * (g * f / Sqrt(a) + c.l1() * sign + c.l2() * w);
      return;
    }
    case v1::OptimizerConfig::kRmsprop: {
      const v1::RmsPropConfig& c = o.rmsprop();
      const double decay = c.decay();
      a = decay * a + (1 - decay) * (g * g);
      b = double{c.momentum()} * b + lr * g / Sqrt(a + c.epsilon());
      w = w - b;
      return;
    }
    case v1::OptimizerConfig::kCustom:  // is compared with the optimizer that it is
    case v1::OptimizerConfig::kNone:
    case v1::OptimizerConfig::KIND_NOT_SET:
      return;
  }
}

inline void ExactUpdate(const v1::OptimizerConfig& o, double step, std::vector<Exact> g,
                        ExactRow& row) {
  for (Exact& x : g) {
    if (o.has_clip_gradient_min()) x = Clamp(x, o.clip_gradient_min(), 1e300);
    if (o.has_clip_gradient_max()) x = Clamp(x, -1e300, o.clip_gradient_max());
  }
  double decay = o.weight_decay_factor();
  if (o.multiply_weight_decay_factor_by_learning_rate()) decay *= o.learning_rate();
  Exact row_value, none;
  if (o.has_rowwise_adagrad()) {
    Exact squares;
    for (const Exact& x : g) squares = squares + x * x;
    row_value = row.slots[0][0] = row.slots[0][0] + squares / static_cast<double>(g.size());
  } else if (o.has_f2a()) {
    row_value = row.slots[1][0] = row.slots[1][0] + 1;
  }
  for (size_t c = 0; c < g.size(); ++c) {
    const auto slot = [&](size_t i) -> Exact& {
      return i < row.slots.size() && row.slots[i].size() > 1 ? row.slots[i][c] : none;
    };
    row.w[c] = row.w[c] * (1 - decay);
    ExactColumn(o, step, g[c], row.w[c], slot(0), slot(1), row_value);
    if (o.has_clip_weight_min()) row.w[c] = Clamp(row.w[c], o.clip_weight_min(), 1e300);
    if (o.has_clip_weight_max()) row.w[c] = Clamp(row.w[c], -1e300, o.clip_weight_max());
  }
}

}  // namespace emberd::shard::testing
