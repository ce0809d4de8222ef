// Adagrad, row-wise Adagrad, AdagradMomentum, F2A.
#include <cmath>
#include <variant>

#include "shard/update/update_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "shard/optimizers/adagrad.cc"
#include "hwy/foreach_target.h"
// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "shard/update/update_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {

template <>
struct Formula<AdagradRule> : ColumnFormula {
  static constexpr int kSlots = 1;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const AdagradRule& rule, V g, V& w, V* slots) {
    V& a = slots[0];
    a = hn::Add(a, hn::Mul(g, g));
    w = hn::Sub(w, DivOrZero(d, hn::Mul(hn::Set(d, rule.learning_rate), g), hn::Sqrt(a)));
  }
};

// For a row, `learning_rate` holds lr / (sqrt(a) + epsilon).
template <>
struct Formula<RowwiseAdagradRule> {
  static constexpr int kSlots = 0;
  static constexpr int kRowSlots = 1;
  // Squares are summed in sixteen columns-modulo-16 sums, then by a tree of halves: one order for
  // all vector lengths. Padding columns add 0.
  static HWY_INLINE float RowSum(const float* g, size_t width) {
    const hn::CappedTag<float, 16> d;
    constexpr size_t kLanes = hn::MaxLanes(d), kVectors = 16 / kLanes;
    hn::Vec<decltype(d)> sums[kVectors];
    for (size_t v = 0; v < kVectors; ++v) sums[v] = hn::Zero(d);
    for (size_t c = 0; c < width; c += 16) {
      for (size_t v = 0; v < kVectors; ++v) {
        const auto x = hn::Load(d, g + c + v * kLanes);
        sums[v] = hn::Add(sums[v], hn::Mul(x, x));
      }
    }
    for (size_t n = kVectors / 2; n > 0; n /= 2) {
      for (size_t v = 0; v < n; ++v) sums[v] = hn::Add(sums[v], sums[v + n]);
    }
    return SumHalves(d, sums[0]);
  }

  // Lanes at half their number apart meet, until one is left.
  template <class D>
  static HWY_INLINE float SumHalves(D d, hn::Vec<D> x) {
#if HWY_TARGET != HWY_SCALAR
    if constexpr (hn::MaxLanes(D()) > 1) {
      const hn::Half<D> half;
      return SumHalves(half, hn::Add(hn::LowerHalf(half, x), hn::UpperHalf(half, x)));
    }
#endif
    return hn::GetLane(x);
  }

  static HWY_INLINE void BeginRows(const RowwiseAdagradRule& rule, RowValues& rows) {
    const hn::CappedTag<float, 8> d8;
    for (int i = 0; i < kRowsAtOnce; i += hn::MaxLanes(d8)) {
      const auto mean = hn::Div(hn::Load(d8, rows.sums + i), hn::Load(d8, rows.columns + i));
      const auto a = hn::Add(hn::Load(d8, rows.values + i), mean);
      hn::Store(a, d8, rows.values + i);
      const auto denominator = hn::Add(hn::Sqrt(a), hn::Set(d8, rule.epsilon));
      hn::Store(DivOrZero(d8, hn::Set(d8, rule.learning_rate), denominator), d8, rows.factors + i);
    }
  }

  static HWY_INLINE RowwiseAdagradRule OfRow(RowwiseAdagradRule rule, float factor) {
    rule.learning_rate = factor;
    return rule;
  }

  template <class D, class V>
  static HWY_INLINE void Step(D d, const RowwiseAdagradRule& rule, V g, V& w, V*) {
    w = hn::Sub(w, hn::Mul(hn::Set(d, rule.learning_rate), g));
  }
};

template <>
struct Formula<AdagradMomentumRule> : ColumnFormula {
  static constexpr int kSlots = 2;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const AdagradMomentumRule& rule, V g, V& w, V* slots) {
    V& a = slots[0];
    V& m = slots[1];
    a = hn::Add(hn::Mul(hn::Set(d, rule.beta2), a),
                hn::Mul(hn::Set(d, rule.square_factor), hn::Mul(g, g)));
    const V sum = hn::Add(a, hn::Set(d, rule.epsilon));
    const V u = rule.exponent == 2 ? hn::Div(g, hn::Sqrt(sum))
                                   : hn::Mul(g, Power(d, sum, -1.0 / rule.exponent));
    const V momentum = hn::Set(d, rule.momentum);
    m = hn::Add(hn::Mul(momentum, m), u);
    const V change = rule.nesterov ? hn::Add(hn::Mul(momentum, m), u) : m;
    w = hn::Sub(w, hn::Mul(hn::Set(d, rule.learning_rate), change));
  }
};

// For a row, `max_lr_multiplier` holds its factor f.
template <>
struct Formula<F2aRule> {
  static constexpr int kSlots = 1;
  static constexpr int kRowSlots = 1;

  static HWY_INLINE float RowSum(const float*, size_t) { return 0; }

  static HWY_INLINE void BeginRows(const F2aRule& rule, RowValues& rows) {
    for (int i = 0; i < kRowsAtOnce; ++i) {
      rows.values[i] += 1;
      const float frequency = rule.step / rows.values[i];
      const float f = static_cast<float>(PortablePow(frequency, rule.rho));
      rows.factors[i] = f < rule.max_lr_multiplier ? f : rule.max_lr_multiplier;
    }
  }

  static HWY_INLINE F2aRule OfRow(F2aRule rule, float factor) {
    rule.max_lr_multiplier = factor;
    return rule;
  }

  template <class D, class V>
  static HWY_INLINE void Step(D d, const F2aRule& rule, V g, V& w, V* slots) {
    V& a = slots[0];
    a = hn::Add(a, hn::Mul(g, g));
    const V f = hn::Set(d, rule.max_lr_multiplier);
    const V sign = hn::IfThenElseZero(hn::Ne(w, hn::Zero(d)), hn::CopySign(hn::Set(d, 1.0f), w));
    const V change = hn::Add(
        hn::Add(DivOrZero(d, hn::Mul(g, f), hn::Sqrt(a)), hn::Mul(hn::Set(d, rule.l1), sign)),
        hn::Mul(hn::Set(d, rule.l2), w));
    w = hn::Sub(w, hn::Mul(hn::Set(d, rule.learning_rate), change));
  }
};

}  // namespace

UpdateCounts UpdateByAdagradTarget(const UpdateArgs& args, const StepRule& step) {
  if (const auto* rule = std::get_if<AdagradRule>(&step.rule))
    return RunUpdateLoop(args, step.common, *rule);
  if (const auto* rule = std::get_if<RowwiseAdagradRule>(&step.rule))
    return RunUpdateLoop(args, step.common, *rule);
  if (const auto* rule = std::get_if<AdagradMomentumRule>(&step.rule))
    return RunUpdateLoop(args, step.common, *rule);
  return RunUpdateLoop(args, step.common, std::get<F2aRule>(step.rule));
}

}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace emberd::shard {
HWY_EXPORT(UpdateByAdagradTarget);
UpdateCounts UpdateByAdagrad(const UpdateArgs& args, const StepRule& rule) {
  return HWY_DYNAMIC_DISPATCH(UpdateByAdagradTarget)(args, rule);
}
}  // namespace emberd::shard
#endif
