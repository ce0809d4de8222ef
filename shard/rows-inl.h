// Vectors of a stored row, float32 or bfloat16. Included once per SIMD target.
#if defined(EMBERD_SHARD_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EMBERD_SHARD_ROWS_INL_H_
#undef EMBERD_SHARD_ROWS_INL_H_
#else
#define EMBERD_SHARD_ROWS_INL_H_
#endif

#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Columns [column, column + lanes) of the row at `row`, as float32.
template <bool kBf16, class D>
HWY_INLINE hn::Vec<D> LoadRow(D d, const char* row, size_t column) {
  if constexpr (kBf16) {
    const hn::Repartition<uint32_t, D> d32;
    const hn::Rebind<uint16_t, D> d16;
    const auto half = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(row) + column);
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, half)));
  } else {
    return hn::LoadU(d, reinterpret_cast<const float*>(row) + column);
  }
}

// The reverse; bfloat16 rounds to nearest even and keeps NaN a quiet NaN, as ToBfloat16 does.
template <bool kBf16, class D>
HWY_INLINE void StoreRow(D d, hn::Vec<D> value, char* row, size_t column) {
  if constexpr (kBf16) {
    const hn::Repartition<uint32_t, D> d32;
    const hn::Repartition<int32_t, D> i32;
    const hn::Rebind<uint16_t, D> d16;
    const auto bits = hn::BitCast(d32, value);
    const auto high = hn::ShiftRight<16>(bits);
    const auto odd = hn::And(high, hn::Set(d32, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(d32, 0x7fff)), odd));
    const auto quiet = hn::Or(high, hn::Set(d32, 0x40));
    const auto nan = hn::RebindMask(d32, hn::Ne(value, value));
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(i32, hn::IfThenElse(nan, quiet, rounded))), d16,
               reinterpret_cast<uint16_t*>(row) + column);
  } else {
    hn::StoreU(value, d, reinterpret_cast<float*>(row) + column);
  }
}

HWY_INLINE void PrefetchRow(const char* row, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) hwy::Prefetch(row + i);
}

}  // namespace
}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
