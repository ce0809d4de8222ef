#include "shard/gather/copy_rows.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "shard/gather/copy_rows.cc"
#include "hwy/foreach_target.h"
// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "shard/update/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

void CopyRow(const char* HWY_RESTRICT row, int64_t bytes, char* HWY_RESTRICT out) {
  const hn::CappedTag<uint8_t, 64> d;
  const hn::CappedTag<uint8_t, 16> d16;
  const auto* from = reinterpret_cast<const uint8_t*>(row);
  auto* to = reinterpret_cast<uint8_t*>(out);
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= bytes; i += lanes) hn::StoreU(hn::LoadU(d, from + i), d, to + i);
  for (; i < bytes; i += 16) hn::StoreU(hn::LoadU(d16, from + i), d16, to + i);
}

}  // namespace

void CopyRowsTarget(const CopyRowsArgs& args) {
  const RowsAhead ahead(args.row_bytes);
  const auto row = [&args](int64_t i) {
    return args.weights + uint64_t{args.rows[std::min(i, args.count - 1)]} * args.row_bytes;
  };
  for (int64_t i = 0; i < args.count; ++i) {
    Prefetch<Cache::kFar>(row(i + ahead.far), args.row_bytes);
    Prefetch<Cache::kNear>(row(i + ahead.near), args.row_bytes);
    CopyRow(row(i), args.row_bytes, args.out + i * args.row_bytes);
  }
}

}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace emberd::shard {
HWY_EXPORT(CopyRowsTarget);
void CopyRows(const CopyRowsArgs& args) { HWY_DYNAMIC_DISPATCH(CopyRowsTarget)(args); }
}  // namespace emberd::shard
#endif
