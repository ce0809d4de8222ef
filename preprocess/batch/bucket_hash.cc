#include "preprocess/batch/bucket_hash.h"

#include <algorithm>
#include <cstring>

#include "highwayhash/highwayhash.h"
#include "preprocess/batch/highway_buckets.h"

namespace emberd::preprocess {
namespace {

using HighwayBuckets = void (*)(int, uint32_t, const int32_t*, int64_t, uint8_t*);

HighwayBuckets PickHighwayBuckets() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return HighwayBucketsAvx2;
#endif
  return HighwayBucketsPortable;
}

}  // namespace

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
  static const HighwayBuckets highway_buckets = PickHighwayBuckets();
  if (rule.single_bucket) {
    std::memset(buckets, 0, n);
    return;
  }
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

uint64_t HashStackedId(int32_t stacked_id) {
  alignas(32) const highwayhash::HHKey key = {kHighwayKey[0], kHighwayKey[1], kHighwayKey[2],
                                              kHighwayKey[3]};
  highwayhash::HHStateT<HH_TARGET_Portable> state(key);
  highwayhash::HHResult64 hash;
  highwayhash::HighwayHashT(&state, reinterpret_cast<const char*>(&stacked_id), sizeof(stacked_id),
                            &hash);
  return hash;
}

}  // namespace emberd::preprocess
