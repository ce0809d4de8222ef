// Vectors of a stored row: float32, bfloat16 or float16. Included once per SIMD target.
#if defined(EMBERD_SHARD_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EMBERD_SHARD_ROWS_INL_H_
#undef EMBERD_SHARD_ROWS_INL_H_
#else
#define EMBERD_SHARD_ROWS_INL_H_
#endif

#include <algorithm>
#include <type_traits>

#include "base/floats.h"
#include "config/optimizers.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// The widths that matter most have code of their own, where there are vectors.
template <int kWidth>
using Width = std::integral_constant<int, kWidth>;
template <class Use>
auto WithWidth(int width, const Use& use) {
#if HWY_TARGET != HWY_SCALAR
  if (width == 16) return use(Width<16>());
  if (width == 32) return use(Width<32>());
  if (width == 64) return use(Width<64>());
  if (width == 128) return use(Width<128>());
#endif
  return use(Width<0>());
}

template <class D>
using Bits = hn::Vec<hn::Repartition<uint32_t, D>>;  // one word per column

// FromFloat16, from the lower half of each word. Whole numbers only, so that targets with and
// without conversion instructions agree on every bit.
template <class D>
HWY_INLINE hn::Vec<D> WidenFloat16(D d, Bits<D> half) {
  const hn::Repartition<uint32_t, D> d32;
  const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(d32, 0x8000)));
  const auto magnitude = hn::ShiftLeft<13>(hn::And(half, hn::Set(d32, 0x7fff)));
  const auto normal = hn::Add(magnitude, hn::Set(d32, 112u << 23));
  const auto special = hn::Add(magnitude, hn::Set(d32, 224u << 23));
  const auto small =
      hn::Sub(hn::BitCast(d, hn::Add(magnitude, hn::Set(d32, 113u << 23))), hn::Set(d, 0x1p-14f));
  auto bits = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d32, 0x0f800000)), normal, special);
  bits = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d32, 1u << 23)), hn::BitCast(d32, small), bits);
  return hn::BitCast(d, hn::Or(bits, sign));
}

// ToFloat16, into the lower half of each word.
template <class D>
HWY_INLINE Bits<D> NarrowToFloat16(D d, hn::Vec<D> value) {
  const hn::Repartition<uint32_t, D> d32;
  const auto bits = hn::BitCast(d32, value);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 0x8000));
  const auto magnitude = hn::And(bits, hn::Set(d32, 0x7fffffff));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d32, 1));
  const auto normal =
      hn::ShiftRight<13>(hn::Add(hn::Sub(magnitude, hn::Set(d32, (112u << 23) - 0xfff)), odd));
  const auto small = hn::Sub(hn::BitCast(d32, hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f))),
                             hn::BitCast(d32, hn::Set(d, 0.5f)));
  auto half = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d32, 0x38800000)), small,
                             hn::Min(normal, hn::Set(d32, uint32_t{kMaxFloat16})));
  half = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d32, 0x7f800000)), hn::Set(d32, 0x7e00), half);
  return hn::Or(half, sign);
}

// ToBfloat16, into the upper half of each word; the lower half is noise.
template <class D>
HWY_INLINE Bits<D> RoundToBfloat16(D, hn::Vec<D> value) {
  const hn::Repartition<uint32_t, D> d32;
  const auto bits = hn::BitCast(d32, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(d32, 0x7fff)), odd);
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x400000));
  // Not by value != value, which the library makes false for NaN on some targets.
  const auto nan = hn::Gt(hn::And(bits, hn::Set(d32, 0x7fffffff)), hn::Set(d32, 0x7f800000));
  return hn::IfThenElse(nan, quiet, rounded);
}

// Columns [column, column + lanes) of the row at `row`, as float32.
template <v1::DataType kDtype, class D>
HWY_INLINE hn::Vec<D> LoadRow(D d, const char* row, size_t column) {
  if constexpr (kDtype == v1::FLOAT32) {
    return hn::LoadU(d, reinterpret_cast<const float*>(row) + column);
  } else {
    const hn::Repartition<uint32_t, D> d32;
    const hn::Rebind<uint16_t, D> d16;
    const auto half =
        hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(row) + column));
    if constexpr (kDtype == v1::FLOAT16) return WidenFloat16(d, half);
    return hn::BitCast(d, hn::ShiftLeft<16>(half));
  }
}

// Writes the lower half of each word.
template <class D>
HWY_INLINE void StoreHalves(D, Bits<D> halves, char* row, size_t column) {
  const hn::Repartition<int32_t, D> i32;
  const hn::Rebind<uint16_t, D> d16;
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(i32, halves)), d16,
             reinterpret_cast<uint16_t*>(row) + column);
}

// The reverse of LoadRow, rounding as ToBfloat16 and ToFloat16 do.
template <v1::DataType kDtype, class D>
HWY_INLINE void StoreRow(D d, hn::Vec<D> value, char* row, size_t column) {
  if constexpr (kDtype == v1::FLOAT32) {
    hn::StoreU(value, d, reinterpret_cast<float*>(row) + column);
  } else if constexpr (kDtype == v1::BFLOAT16) {
    StoreHalves(d, hn::ShiftRight<16>(RoundToBfloat16(d, value)), row, column);
  } else {
    StoreHalves(d, NarrowToFloat16(d, value), row, column);
  }
}

// Two neighbouring vectors of a bfloat16 row at once: one load or store, and no lane crosses over.
#if HWY_TARGET != HWY_SCALAR
// The even and the odd ones of columns [column, column + 2 * lanes).
template <class D>
HWY_INLINE void LoadPair(D d, const char* row, size_t column, hn::Vec<D>& even, hn::Vec<D>& odd) {
  const hn::Repartition<uint16_t, D> d16;
  const hn::Repartition<uint32_t, D> d32;
  const auto pairs =
      hn::BitCast(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(row) + column));
  even = hn::BitCast(d, hn::ShiftLeft<16>(pairs));
  odd = hn::BitCast(d, hn::And(pairs, hn::Set(d32, 0xffff0000)));
}

// StoreRow of the columns in their order.
template <class D>
HWY_INLINE void StorePair(D d, hn::Vec<D> first, hn::Vec<D> second, char* row, size_t column) {
  const hn::Repartition<uint16_t, D> d16;
  hn::StoreU(hn::ConcatOdd(d16, hn::BitCast(d16, RoundToBfloat16(d, second)),
                           hn::BitCast(d16, RoundToBfloat16(d, first))),
             d16, reinterpret_cast<uint16_t*>(row) + column);
}
#endif

// Writes a row of 16-bit weights, each rounded to a neighbour by the random bits of its column: the
// mean over all bits is the value (float16 below 2^-14: almost). What is finite stays so.
template <v1::DataType kDtype, class D>
HWY_INLINE void StoreRowRandomly(D d, hn::Vec<D> value, const uint16_t* random_bits, char* row,
                                 size_t column) {
  const hn::Repartition<uint32_t, D> d32;
  const hn::Repartition<int32_t, D> i32;
  const hn::Rebind<uint16_t, D> d16;
  const auto random = hn::PromoteTo(d32, hn::LoadU(d16, random_bits));
  const auto bits = hn::BitCast(d32, value);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 0x8000));
  const auto magnitude = hn::And(bits, hn::Set(d32, 0x7fffffff));
  Bits<D> rounded, special;
  uint32_t special_from;
  if constexpr (kDtype == v1::BFLOAT16) {
    rounded =
        hn::Min(hn::ShiftRight<16>(hn::Add(magnitude, random)), hn::Set(d32, uint32_t{0x7f7f}));
    special = hn::ShiftRight<16>(RoundToBfloat16(d, value));
    special_from = 0x7f800000;
  } else {
    const auto normal = hn::ShiftRight<13>(
        hn::Add(hn::Sub(magnitude, hn::Set(d32, 112u << 23)), hn::ShiftRight<3>(random)));
    const auto multiple = hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 0x1p24f));
    const auto down = hn::Floor(multiple);
    const auto threshold =
        hn::Mul(hn::Add(hn::ConvertTo(d, hn::BitCast(i32, random)), hn::Set(d, 0.5f)),
                hn::Set(d, 0x1p-16f));
    const auto up =
        hn::IfThenElseZero(hn::Gt(hn::Sub(multiple, down), threshold), hn::Set(d, 1.0f));
    const auto small = hn::BitCast(d32, hn::ConvertTo(i32, hn::Add(down, up)));
    rounded = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d32, 0x38800000)), small,
                             hn::Min(normal, hn::Set(d32, uint32_t{kMaxFloat16})));
    special = NarrowToFloat16(d, value);
    special_from = 0x47800000;
  }
  const auto is_special = hn::Not(hn::Lt(magnitude, hn::Set(d32, special_from)));
  StoreHalves(d, hn::IfThenElse(is_special, special, hn::Or(rounded, sign)), row, column);
}

// How many rows ahead of its use memory is asked for: `far` ahead into the second level of cache,
// which has more requests under way than the first one can, and from there, `near` ahead, into the
// first. Fewer rows where that many would push each other out.
struct RowsAhead {
  static constexpr size_t kMost = 96;
  size_t near, far;

  explicit constexpr RowsAhead(size_t row_bytes)
      : near(std::clamp<size_t>((size_t{6} << 10) / row_bytes, 1, 16)),
        far(std::clamp<size_t>((size_t{128} << 10) / row_bytes, 1, kMost)) {}
};

enum class Cache { kNear, kFar };

template <Cache kCache>
HWY_INLINE void Prefetch(const void* row, size_t bytes) {
  const auto line = reinterpret_cast<uintptr_t>(row);  // a row that is not there is null
  for (size_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(line + i), 0, kCache == Cache::kNear ? 3 : 2);
  }
}

// Asks for what lies 1 KiB beyond `next`, which is about to be read, in an array that is read to
// its end: the list that says which rows come. Beyond the end nothing happens.
HWY_INLINE void PrefetchList(const void* next) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(next) + 1024));
}

}  // namespace
}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
