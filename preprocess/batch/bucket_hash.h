// Which of the 64 vocabulary buckets of mini-batching a row of a stack belongs to.
#pragma once

#include <cstdint>

#include "emberd/v1/model.pb.h"
#include "preprocess/batch/stack_shape.h"

namespace emberd::preprocess {

inline constexpr int kBuckets = 64;

// What a bucket depends on besides the row.
struct BucketRule {
  v1::BucketHash hash = v1::HIGHWAY_HASH;
  int partition_bits = 0;       // log2 P
  int64_t rows_per_bucket = 1;  // ID_RANGE: stacked ids of one bucket
  bool single_bucket = false;   // every row in bucket 0: limits without mini-batching
};

BucketRule MakeBucketRule(v1::BucketHash hash, const StackShape& shape);

// buckets[i] = bucket of local row local_rows[i] of the partition, for i in [0, n).
void BucketsOf(const BucketRule& rule, int64_t partition, const int32_t* local_rows, int64_t n,
               uint8_t* buckets);

// HighwayHash-64, with JAX's key, of the 4 little-endian bytes of a stacked id.
uint64_t HashStackedId(int32_t stacked_id);

}  // namespace emberd::preprocess
