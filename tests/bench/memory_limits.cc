#include "tests/bench/memory_limits.h"

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
using D = hn::CappedTag<uint8_t, 64>;
using Half = hn::CappedTag<uint8_t, 16>;

HWY_INLINE void PrefetchBytes(const char* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) hwy::Prefetch(p + i);
}

const uint8_t* Bytes(const char* p) { return reinterpret_cast<const uint8_t*>(p); }

// f(offset, tag) for each vector of a row.
template <class F>
HWY_INLINE void ForEachVector(size_t bytes, const F& f) {
  constexpr size_t kLanes = hn::MaxLanes(D());
  size_t i = 0;
  for (; i + kLanes <= bytes; i += kLanes) f(i, D());
  for (; i < bytes; i += 16) f(i, Half());
}

}  // namespace

float GatherTarget(const char* table, size_t row_bytes, const shard::Entry* entries, int64_t count,
                   int ahead) {
  auto sum = hn::Zero(D());
  auto rest = hn::Zero(Half());
  for (int64_t i = 0; i < count; ++i) {
    if (ahead > 0) PrefetchBytes(table + entries[i + ahead].row * row_bytes, row_bytes);
    const char* row = table + entries[i].row * row_bytes;
    ForEachVector(row_bytes, [&](size_t offset, auto d) HWY_ATTR {
      const auto v = hn::LoadU(d, Bytes(row) + offset);
      if constexpr (std::is_same_v<decltype(d), D>) {
        sum = hn::Xor(sum, v);
      } else {
        rest = hn::Xor(rest, v);
      }
    });
  }
  return static_cast<float>(hn::GetLane(sum) + hn::GetLane(rest));
}

void CopyTarget(const char* table, size_t row_bytes, const shard::Entry* entries, int64_t count,
                int ahead, size_t out_bytes, char* out) {
  for (int64_t i = 0; i < count; ++i) {
    if (ahead > 0) PrefetchBytes(table + entries[i + ahead].row * row_bytes, row_bytes);
    const char* row = table + entries[i].row * row_bytes;
    uint8_t* to = reinterpret_cast<uint8_t*>(out) + i * out_bytes;
    ForEachVector(row_bytes, [&](size_t offset, auto d) HWY_ATTR {
      const auto v = hn::LoadU(d, Bytes(row) + offset);
      hn::StoreU(v, d, to + offset);
      if (out_bytes > row_bytes) hn::StoreU(v, d, to + row_bytes + offset);
    });
  }
}

float UpdateTarget(char* table, size_t row_bytes, char* slot, size_t slot_bytes,
                   const float* gradients, size_t gradient_bytes, const shard::Touch* touches,
                   int64_t count, int ahead) {
  const char* gradient_rows = reinterpret_cast<const char*>(gradients);
  auto sum = hn::Zero(D());
  auto rest = hn::Zero(Half());
  // 0, which the compiler must not know: rows keep their values.
  static volatile uint8_t hidden_zero = 0;
  const uint8_t zero = hidden_zero;
  const auto rewrite = [&](char* row, size_t bytes) HWY_ATTR {
    ForEachVector(bytes, [&](size_t offset, auto d) HWY_ATTR {
      uint8_t* p = reinterpret_cast<uint8_t*>(row) + offset;
      hn::StoreU(hn::Xor(hn::LoadU(d, p), hn::Set(d, zero)), d, p);
    });
  };
  for (int64_t i = 0; i < count; ++i) {
    const shard::Touch next = touches[i + ahead];
    PrefetchBytes(gradient_rows + next.sample * gradient_bytes, gradient_bytes);
    PrefetchBytes(table + next.row * row_bytes, row_bytes);
    PrefetchBytes(slot + next.row * slot_bytes, slot_bytes);
    const char* gradient = gradient_rows + touches[i].sample * gradient_bytes;
    ForEachVector(gradient_bytes, [&](size_t offset, auto d) HWY_ATTR {
      const auto v = hn::LoadU(d, Bytes(gradient) + offset);
      if constexpr (std::is_same_v<decltype(d), D>) {
        sum = hn::Xor(sum, v);
      } else {
        rest = hn::Xor(rest, v);
      }
    });
    if (i + 1 < count && touches[i + 1].row == touches[i].row) continue;
    rewrite(table + touches[i].row * row_bytes, row_bytes);
    if (slot_bytes == 4) {
      ++*(reinterpret_cast<float*>(slot) + touches[i].row);
    } else {
      rewrite(slot + touches[i].row * slot_bytes, slot_bytes);
    }
  }
  return static_cast<float>(hn::GetLane(sum) + hn::GetLane(rest));
}

}  // namespace emberd::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace emberd::bench {
HWY_EXPORT(GatherTarget);
HWY_EXPORT(CopyTarget);
HWY_EXPORT(UpdateTarget);

float GatherLimit(const char* table, size_t row_bytes, const shard::Entry* entries, int64_t count,
                  int ahead) {
  return HWY_DYNAMIC_DISPATCH(GatherTarget)(table, row_bytes, entries, count, ahead);
}
void CopyLimit(const char* table, size_t row_bytes, const shard::Entry* entries, int64_t count,
               int ahead, size_t out_bytes, char* out) {
  HWY_DYNAMIC_DISPATCH(CopyTarget)(table, row_bytes, entries, count, ahead, out_bytes, out);
}
float UpdateLimit(char* table, size_t row_bytes, char* slot, size_t slot_bytes,
                  const float* gradients, size_t gradient_bytes, const shard::Touch* touches,
                  int64_t count, int ahead) {
  return HWY_DYNAMIC_DISPATCH(UpdateTarget)(table, row_bytes, slot, slot_bytes, gradients,
                                            gradient_bytes, touches, count, ahead);
}
}  // namespace emberd::bench
#endif
