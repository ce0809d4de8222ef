// Which of the 64 vocabulary buckets of mini-batching a row of a stack belongs to.
#pragma once

#include <atomic>
#include <cstdint>

#include "emberd/v1/model.pb.h"
#include "preprocess/batch/sort_and_merge.h"

namespace emberd::preprocess {

inline constexpr int kBuckets = 64;

// What a bucket depends on besides the row.
struct BucketRule {
  v1::BucketHash hash = v1::HIGHWAY_HASH;
  int partition_bits = 0;       // log2 P
  int64_t rows_per_bucket = 1;  // ID_RANGE: stacked ids of one bucket
};

BucketRule MakeBucketRule(v1::BucketHash hash, const StackShape& shape);

// buckets[i] = bucket of local row local_rows[i] of the partition, for i in [0, n).
void BucketsOf(const BucketRule& rule, int64_t partition, const int32_t* local_rows, int64_t n,
               uint8_t* buckets);

// Remembers the buckets of a stack's rows, because hashing a row costs more than sorting it: one
// byte per row, filled row by row as rows turn up. Thread-safe: whoever hashes a row finds the same
// bucket.
class BucketMemo {
 public:
  BucketMemo() = default;
  // `memory` holds BytesFor(rule, shape) zero bytes and outlives the memo; null: every row is
  // hashed each time.
  BucketMemo(const BucketRule& rule, const StackShape& shape, uint8_t* memory);

  // 0 for rules that are as cheap as memory.
  static int64_t BytesFor(const BucketRule& rule, const StackShape& shape);

  // buckets[i] = bucket of local row local_rows[i] of the partition, for i in [0, n). Rows ascend,
  // and may repeat.
  void Find(int64_t partition, const int32_t* local_rows, int64_t n, uint8_t* buckets) const;

 private:
  void FindMissing(int64_t partition, std::atomic<uint8_t>* known, const int32_t* local_rows,
                   int64_t n, uint8_t* buckets) const;

  BucketRule rule_;
  int64_t rows_per_partition_ = 0;
  // [partitions * rows_per_partition]: bucket + 1, or 0 where it is not known. Null: nothing is
  // remembered.
  std::atomic<uint8_t>* known_ = nullptr;
};

}  // namespace emberd::preprocess
