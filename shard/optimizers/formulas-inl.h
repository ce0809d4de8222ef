// What an optimizer is: a specialisation of Formula, which says how many slots it has, and its step
// on one vector of columns. Included once per SIMD target.
#if defined(EMBERD_SHARD_OPTIMIZERS_FORMULAS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EMBERD_SHARD_OPTIMIZERS_FORMULAS_INL_H_
#undef EMBERD_SHARD_OPTIMIZERS_FORMULAS_INL_H_
#else
#define EMBERD_SHARD_OPTIMIZERS_FORMULAS_INL_H_
#endif

#include "hwy/highway.h"
#include "shard/store/portable_numbers.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Specialised for each rule:
//   static constexpr int kSlots;  // state vectors, one value per column
//   static void Step(D d, const Rule& rule, Vec g, Vec& w, Vec* slots);
// and, if it keeps one value per row (stored after the others),
//   static constexpr int kRowSlots = 1;
//   static float RowSum(const float* g, size_t width);  // what the value needs of the gradient,
//                                                       // which has zeros up to a multiple of 16
//   static void BeginRows(const Rule& rule, RowValues& rows);
//   static Rule OfRow(Rule rule, float factor);  // the rule for one row
template <class Rule>
struct Formula;

// For formulas without a value per row.
struct ColumnFormula {
  static constexpr int kRowSlots = 0;
};

// Rows whose values are updated together, so that roots and quotients of several are under way.
constexpr int kRowsAtOnce = 8;
struct RowValues {
  HWY_ALIGN float sums[kRowsAtOnce];     // RowSum
  HWY_ALIGN float columns[kRowsAtOnce];  // live columns, at least 1; 0 where there is no row
  HWY_ALIGN float values[kRowsAtOnce];   // of the slot
  HWY_ALIGN float factors[kRowsAtOnce];  // for OfRow
};

// n / d, and 0 where d is 0.
template <class D, class V>
HWY_INLINE V DivOrZero(D d, V numerator, V denominator) {
  return hn::IfThenZeroElse(hn::Eq(denominator, hn::Zero(d)), hn::Div(numerator, denominator));
}

// NaN stays NaN, on every target.
template <class D, class V>
HWY_INLINE V Clamp(D d, V x, float low, float high) {
  const auto l = hn::Set(d, low);
  const auto h = hn::Set(d, high);
  return hn::IfThenElse(hn::Lt(x, l), l, hn::IfThenElse(hn::Lt(h, x), h, x));
}

// x^p. The usual powers are exact or one rounding away; any other is worked out in double, column
// by column.
template <class D, class V>
HWY_INLINE V Power(D d, V x, double exponent) {
  if (exponent == 0.5) return hn::Sqrt(x);
  if (exponent == 0) return hn::Set(d, 1.0f);
  if (exponent == 1) return x;
  HWY_ALIGN float values[hn::MaxLanes(d)];
  hn::Store(x, d, values);
  for (float& value : values) value = static_cast<float>(PortablePow(value, exponent));
  return hn::Load(d, values);
}

template <>
struct Formula<SgdRule> : ColumnFormula {
  static constexpr int kSlots = 0;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const SgdRule& rule, V g, V& w, V*) {
    w = hn::Sub(w, hn::Mul(hn::Set(d, rule.learning_rate), g));
  }
};

template <>
struct Formula<MomentumRule> : ColumnFormula {
  static constexpr int kSlots = 1;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const MomentumRule& rule, V g, V& w, V* slots) {
    const V momentum = hn::Set(d, rule.momentum);
    V& m = slots[0];
    m = hn::Add(hn::Mul(momentum, m), g);
    const V change = rule.nesterov ? hn::Add(hn::Mul(momentum, m), g) : m;
    w = hn::Sub(w, hn::Mul(hn::Set(d, rule.learning_rate), change));
  }
};

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
    V u;
    if (rule.exponent == 2) {
      u = hn::Div(g, hn::Sqrt(sum));
    } else {  // the power of a small exponent may be infinite, and 0 times that is NaN
      u = hn::Mul(g, Power(d, sum, -1.0 / rule.exponent));
      u = hn::IfThenElse(hn::Eq(g, hn::Zero(d)), g, u);
    }
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

template <>
struct Formula<AdamRule> : ColumnFormula {
  static constexpr int kSlots = 2;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const AdamRule& rule, V g, V& w, V* slots) {
    V& m = slots[0];
    V& v = slots[1];
    m = hn::Add(m, hn::Mul(hn::Set(d, rule.one_minus_beta1), hn::Sub(g, m)));
    v = hn::Add(v, hn::Mul(hn::Set(d, rule.one_minus_beta2), hn::Sub(hn::Mul(g, g), v)));
    const V epsilon = hn::Set(d, rule.epsilon);
    const V root =
        rule.sum_inside_sqrt ? hn::Sqrt(hn::Add(v, epsilon)) : hn::Add(hn::Sqrt(v), epsilon);
    const V change = DivOrZero(d, hn::Mul(hn::Set(d, rule.rate), m), root);
    w = hn::Sub(hn::Mul(hn::Set(d, rule.keep), w), change);
  }
};

template <>
struct Formula<LaPropRule> : ColumnFormula {
  static constexpr int kSlots = 2;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const LaPropRule& rule, V g, V& w, V* slots) {
    V& mu = slots[0];
    V& nu = slots[1];
    const V square = hn::Add(hn::Mul(g, g), hn::Set(d, rule.epsilon));
    nu = hn::Add(hn::Mul(hn::Set(d, rule.decay), nu),
                 hn::Mul(hn::Set(d, rule.one_minus_decay), square));
    const V scaled = DivOrZero(d, hn::Mul(hn::Set(d, rule.gradient_factor), g), hn::Sqrt(nu));
    mu = hn::Add(hn::Mul(hn::Set(d, rule.beta1), mu), scaled);
    w = hn::Sub(w, hn::Mul(hn::Set(d, rule.learning_rate), mu));
  }
};

template <>
struct Formula<RmsPropRule> : ColumnFormula {
  static constexpr int kSlots = 2;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const RmsPropRule& rule, V g, V& w, V* slots) {
    V& v = slots[0];
    V& m = slots[1];
    v = hn::Add(v, hn::Mul(hn::Set(d, rule.one_minus_decay), hn::Sub(hn::Mul(g, g), v)));
    const V root = hn::Sqrt(hn::Add(v, hn::Set(d, rule.epsilon)));
    m = hn::Add(hn::Mul(hn::Set(d, rule.momentum), m),
                DivOrZero(d, hn::Mul(hn::Set(d, rule.learning_rate), g), root));
    w = hn::Sub(w, m);
  }
};

template <>
struct Formula<FtrlRule> : ColumnFormula {
  static constexpr int kSlots = 2;
  template <class D, class V>
  static HWY_INLINE void Step(D d, const FtrlRule& rule, V g, V& w, V* slots) {
    V& a = slots[0];
    V& linear = slots[1];
    const V rate = hn::Set(d, rule.learning_rate);
    const V beta = hn::Set(d, rule.beta);
    const V old_power = Power(d, a, rule.power);
    a = hn::Add(a, hn::Mul(g, g));
    const V power = Power(d, a, rule.power);
    const V pull = hn::Mul(hn::Sub(power, old_power), w);
    float bound = rule.l1;
    V denominator;
    if (rule.multiply_linear) {
      linear = hn::Add(linear, hn::Sub(hn::Mul(rate, g), pull));
      bound *= rule.learning_rate;
      const float ridge = 2 * rule.learning_rate * rule.l2;
      denominator = hn::Add(hn::Add(power, hn::Set(d, ridge)), beta);
    } else {
      linear = hn::Add(linear, hn::Sub(g, hn::Div(pull, rate)));
      denominator = hn::Add(hn::Div(hn::Add(power, beta), rate), hn::Set(d, 2 * rule.l2));
    }
    w = DivOrZero(d, hn::Sub(Clamp(d, linear, -bound, bound), linear), denominator);
  }
};

}  // namespace
}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
