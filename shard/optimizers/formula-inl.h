// What an optimizer is: a specialisation of Formula, which says how many slots it has, and its step
// on one vector of columns. Included once per SIMD target.
#if defined(EMBERD_SHARD_OPTIMIZERS_FORMULA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EMBERD_SHARD_OPTIMIZERS_FORMULA_INL_H_
#undef EMBERD_SHARD_OPTIMIZERS_FORMULA_INL_H_
#else
#define EMBERD_SHARD_OPTIMIZERS_FORMULA_INL_H_
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

}  // namespace
}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
