#include "preprocess/batch/buckets.h"

#include <algorithm>
#include <cstring>

#include "preprocess/batch/highway_buckets.h"

namespace emberd::preprocess {
namespace {

constexpr int64_t kBlock = 256;
constexpr int64_t kAhead = 32;  // rows prefetched
constexpr uint8_t kUnknown = 255;

using HighwayFunction = void (*)(int, uint32_t, const int32_t*, int64_t, uint8_t*);

HighwayFunction PickHighwayBuckets() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return HighwayBucketsAvx2;
#endif
  return HighwayBucketsPortable;
}

}  // namespace

void HighwayBucketsPortable(int partition_bits, uint32_t partition, const int32_t* local_rows,
                            int64_t n, uint8_t* buckets) {
  HighwayBuckets<highwayhash::HHStateT<HH_TARGET_Portable>>(partition_bits, partition, local_rows,
                                                            n, buckets);
}

BucketRule MakeBucketRule(v1::BucketHash hash, const StackShape& shape) {
  BucketRule rule;
  rule.hash = hash == v1::BUCKET_HASH_UNSPECIFIED ? v1::HIGHWAY_HASH : hash;
  rule.partition_bits = shape.partition_bits();
  rule.rows_per_bucket = std::max<int64_t>(
      1, RoundUp(shape.rows_per_partition * shape.partitions, kBuckets) / kBuckets);
  return rule;
}

void BucketsOf(const BucketRule& rule, int64_t partition, const int32_t* local_rows, int64_t n,
               uint8_t* buckets) {
  static const HighwayFunction highway_buckets = PickHighwayBuckets();
  const auto stacked_id = [&](int64_t i) {
    return static_cast<int64_t>(local_rows[i]) << rule.partition_bits | partition;
  };
  switch (rule.hash) {
    case v1::ID_RANGE:
      for (int64_t i = 0; i < n; ++i) {
        buckets[i] = static_cast<uint8_t>(
            std::min<int64_t>(stacked_id(i) / rule.rows_per_bucket, kBuckets - 1));
      }
      return;
    case v1::ID_MODULO:
      for (int64_t i = 0; i < n; ++i) buckets[i] = static_cast<uint8_t>(stacked_id(i) % kBuckets);
      return;
    case v1::LOCAL_ROW_MODULO:
      for (int64_t i = 0; i < n; ++i) buckets[i] = static_cast<uint8_t>(local_rows[i] % kBuckets);
      return;
    default:
      highway_buckets(rule.partition_bits, static_cast<uint32_t>(partition), local_rows, n,
                      buckets);
  }
}

BucketMemo::BucketMemo(const BucketRule& rule, const StackShape& shape, uint8_t* memory)
    : rule_(rule),
      rows_per_partition_(shape.rows_per_partition),
      known_(reinterpret_cast<std::atomic<uint8_t>*>(memory)) {
  static_assert(sizeof(std::atomic<uint8_t>) == 1 && std::atomic<uint8_t>::is_always_lock_free);
}

int64_t BucketMemo::BytesFor(const BucketRule& rule, const StackShape& shape) {
  if (rule.hash != v1::HIGHWAY_HASH) return 0;
  return shape.partitions * shape.rows_per_partition;
}

void BucketMemo::Find(int64_t partition, const int32_t* local_rows, int64_t n,
                      uint8_t* buckets) const {
  if (rule_.hash != v1::HIGHWAY_HASH) return BucketsOf(rule_, partition, local_rows, n, buckets);
  std::atomic<uint8_t>* known = nullptr;
  if (known_ != nullptr) known = known_ + partition * rows_per_partition_;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    bool missing = known == nullptr;
    if (missing) std::memset(buckets + begin, kUnknown, end - begin);
    for (int64_t i = missing ? end : begin; i < end; ++i) {
      if (i + kAhead < n) __builtin_prefetch(known + local_rows[i + kAhead], 1);
      const uint8_t found = known[local_rows[i]].load(std::memory_order_relaxed);
      missing |= found == 0;
      buckets[i] = static_cast<uint8_t>(found - 1);
    }
    if (missing) FindMissing(partition, known, local_rows + begin, end - begin, buckets + begin);
  }
}

// Hashes the rows of a block whose bucket is not known.
void BucketMemo::FindMissing(int64_t partition, std::atomic<uint8_t>* known,
                             const int32_t* local_rows, int64_t n, uint8_t* buckets) const {
  int32_t rows[kBlock] = {};
  uint8_t found[kBlock];
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool repeat = count > 0 && rows[count - 1] == local_rows[i];
    if (buckets[i] == kUnknown && !repeat) rows[count++] = local_rows[i];
  }
  BucketsOf(rule_, partition, rows, count, found);
  int64_t at = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (buckets[i] != kUnknown) continue;
    if (rows[at] != local_rows[i]) ++at;
    buckets[i] = found[at];
    if (known == nullptr) continue;
    known[local_rows[i]].store(static_cast<uint8_t>(found[at] + 1), std::memory_order_relaxed);
  }
}

}  // namespace emberd::preprocess
