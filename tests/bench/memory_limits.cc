#include "tests/bench/memory_limits.h"

#include <cstdlib>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/bench/memory_limits.cc"
#include "hwy/foreach_target.h"
// Must come after foreach_target.h.
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::bench::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// A row of kBytes bytes. Its size is a constant, so that the loops below are unrolled.
template <size_t kBytes>
struct Row {
  using D = hn::CappedTag<uint8_t, (kBytes < 64 ? kBytes : 64)>;
  using V = hn::Vec<D>;
  static constexpr size_t kStep = hn::MaxLanes(D());

  static HWY_INLINE void Prefetch(const char* row) {
#pragma GCC unroll 16
    for (size_t i = 0; i < kBytes; i += 64) hwy::Prefetch(row + i);
  }
  static HWY_INLINE void PrefetchFar(const char* row) {
#pragma GCC unroll 16
    for (size_t i = 0; i < kBytes; i += 64) __builtin_prefetch(row + i, 0, 2);
  }
  static HWY_INLINE V Load(const char* row, size_t i) {
    return hn::LoadU(D(), reinterpret_cast<const uint8_t*>(row) + i);
  }
  static HWY_INLINE void Store(V v, char* row, size_t i) {
    hn::StoreU(v, D(), reinterpret_cast<uint8_t*>(row) + i);
  }
  static HWY_INLINE void Read(const char* row, V& sum) {
#pragma GCC unroll 32
    for (size_t i = 0; i < kBytes; i += kStep) sum = hn::Xor(sum, Load(row, i));
  }
  static HWY_INLINE void Copy(const char* row, char* to) {
#pragma GCC unroll 32
    for (size_t i = 0; i < kBytes; i += kStep) Store(Load(row, i), to, i);
  }
  static HWY_INLINE void Rewrite(char* row, V zero) {
#pragma GCC unroll 32
    for (size_t i = 0; i < kBytes; i += kStep) Store(hn::Xor(Load(row, i), zero), row, i);
  }
};

template <size_t kBytes>
struct Gather {
  static uint8_t Run(const char* table, const shard::Entry* entries, int64_t count, Ahead ahead) {
    using R = Row<kBytes>;
    auto sum = hn::Zero(typename R::D());
    for (int64_t i = 0; i < count; ++i) {
      if (ahead.far > 0) R::PrefetchFar(table + entries[i + ahead.far].row * kBytes);
      R::Prefetch(table + entries[i + ahead.near].row * kBytes);
      R::Read(table + entries[i].row * kBytes, sum);
    }
    return hn::GetLane(sum);
  }
};

template <size_t kBytes, size_t kOutBytes>
void CopyRows(const char* table, const shard::Entry* entries, int64_t count, Ahead ahead,
              char* out) {
  using R = Row<kBytes>;
  for (int64_t i = 0; i < count; ++i) {
    if (ahead.far > 0) R::PrefetchFar(table + entries[i + ahead.far].row * kBytes);
    R::Prefetch(table + entries[i + ahead.near].row * kBytes);
    for (size_t j = 0; j < kOutBytes; j += kBytes) {
      R::Copy(table + entries[i].row * kBytes, out + i * kOutBytes + j);
    }
  }
}

template <size_t kBytes, size_t kSlotBytes, size_t kGradientBytes>
uint8_t UpdateAll(const UpdateTraffic& traffic, Ahead ahead) {
  using R = Row<kBytes>;
  using G = Row<kGradientBytes>;
  using S = Row<(kSlotBytes < 16 ? 16 : kSlotBytes)>;
  auto sum = hn::Zero(typename G::D());
  // 0, which the compiler must not know: rows keep their values.
  static volatile uint8_t hidden_zero = 0;
  const uint8_t zero = hidden_zero;
  const auto row_zero = hn::Set(typename R::D(), zero);
  const auto slot_zero = hn::Set(typename S::D(), zero);
  const shard::Touch* touch = traffic.touches;
  const shard::Touch* const end = touch + traffic.count;
  for (; touch != end; ++touch) {
    if (ahead.far > 0) {
      const shard::Touch& later = touch[ahead.far];
      G::PrefetchFar(traffic.gradients + later.sample * kGradientBytes);
      if (later.row != touch[ahead.far - 1].row) {
        R::PrefetchFar(traffic.table + later.row * kBytes);
        Row<kSlotBytes>::PrefetchFar(traffic.slot + later.row * kSlotBytes);
      }
    }
    const shard::Touch& next = touch[ahead.near];
    G::Prefetch(traffic.gradients + next.sample * kGradientBytes);
    if (next.row != touch[ahead.near - 1].row) {
      R::Prefetch(traffic.table + next.row * kBytes);
      Row<kSlotBytes>::Prefetch(traffic.slot + next.row * kSlotBytes);
    }
    G::Read(traffic.gradients + touch->sample * kGradientBytes, sum);
    if (touch + 1 != end && touch[1].row == touch->row) continue;
    R::Rewrite(traffic.table + touch->row * kBytes, row_zero);
    if (kSlotBytes == 4) {
      *(reinterpret_cast<float*>(traffic.slot) + touch->row) += 1;
    } else {
      S::Rewrite(traffic.slot + touch->row * kSlotBytes, slot_zero);
    }
  }
  return hn::GetLane(sum);
}

template <size_t kWidth>
uint8_t UpdateWidth(const UpdateTraffic& traffic, Ahead ahead) {
  constexpr size_t kFloats = kWidth * 4;
  const bool half = traffic.row_bytes < kFloats;
  if (traffic.slot_bytes == 4) {
    return half ? UpdateAll<kFloats / 2, 4, kFloats>(traffic, ahead)
                : UpdateAll<kFloats, 4, kFloats>(traffic, ahead);
  }
  return half ? UpdateAll<kFloats / 2, kFloats, kFloats>(traffic, ahead)
              : UpdateAll<kFloats, kFloats, kFloats>(traffic, ahead);
}

}  // namespace

int GatherTarget(const char* table, size_t row_bytes, const shard::Entry* entries, int64_t count,
                 Ahead ahead) {
  switch (row_bytes) {
    case 32:
      return Gather<32>::Run(table, entries, count, ahead);
    case 64:
      return Gather<64>::Run(table, entries, count, ahead);
    case 128:
      return Gather<128>::Run(table, entries, count, ahead);
    case 256:
      return Gather<256>::Run(table, entries, count, ahead);
    case 512:
      return Gather<512>::Run(table, entries, count, ahead);
  }
  std::abort();
}

void CopyTarget(const char* table, size_t row_bytes, const shard::Entry* entries, int64_t count,
                Ahead ahead, size_t out_bytes, char* out) {
  const bool half = row_bytes < out_bytes;
  switch (out_bytes) {
    case 64:
      return (half ? CopyRows<32, 64> : CopyRows<64, 64>)(table, entries, count, ahead, out);
    case 128:
      return (half ? CopyRows<64, 128> : CopyRows<128, 128>)(table, entries, count, ahead, out);
    case 256:
      return (half ? CopyRows<128, 256> : CopyRows<256, 256>)(table, entries, count, ahead, out);
    case 512:
      return (half ? CopyRows<256, 512> : CopyRows<512, 512>)(table, entries, count, ahead, out);
  }
  std::abort();
}

int UpdateTarget(const UpdateTraffic& traffic, Ahead ahead) {
  switch (traffic.gradient_bytes) {
    case 64:
      return UpdateWidth<16>(traffic, ahead);
    case 128:
      return UpdateWidth<32>(traffic, ahead);
    case 256:
      return UpdateWidth<64>(traffic, ahead);
    case 512:
      return UpdateWidth<128>(traffic, ahead);
  }
  std::abort();
}

}  // namespace emberd::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace emberd::bench {
HWY_EXPORT(GatherTarget);
HWY_EXPORT(CopyTarget);
HWY_EXPORT(UpdateTarget);

int GatherLimit(const char* table, size_t row_bytes, const shard::Entry* entries, int64_t count,
                Ahead ahead) {
  return HWY_DYNAMIC_DISPATCH(GatherTarget)(table, row_bytes, entries, count, ahead);
}
void CopyLimit(const char* table, size_t row_bytes, const shard::Entry* entries, int64_t count,
               Ahead ahead, size_t out_bytes, char* out) {
  HWY_DYNAMIC_DISPATCH(CopyTarget)(table, row_bytes, entries, count, ahead, out_bytes, out);
}
int UpdateLimit(const UpdateTraffic& traffic, Ahead ahead) {
  return HWY_DYNAMIC_DISPATCH(UpdateTarget)(traffic, ahead);
}
}  // namespace emberd::bench
#endif
