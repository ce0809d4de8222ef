// x^p on vectors, with the same bits on every target. Included once per SIMD target.
#if defined(EMBERD_SHARD_OPTIMIZERS_POWER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EMBERD_SHARD_OPTIMIZERS_POWER_INL_H_
#undef EMBERD_SHARD_OPTIMIZERS_POWER_INL_H_
#else
#define EMBERD_SHARD_OPTIMIZERS_POWER_INL_H_
#endif

#include "hwy/highway.h"
#include "shard/store/portable_math.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// The usual powers are exact or one rounding away; any other is worked out in double, column by
// column.
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
