// Remembers the buckets of a stack's rows, because hashing costs more than sorting.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "preprocess/bucket_hash.h"

namespace emberd::preprocess {

// One byte per row, filled row by row as rows turn up; the system backs only pages that were
// touched. Rules that are as cheap as memory are not remembered. Thread-safe: whoever hashes a row
// finds the same bucket.
class BucketMemo {
 public:
  BucketMemo() = default;
  // Without `remember`, every row is hashed each time.
  BucketMemo(const BucketRule& rule, const StackShape& shape, bool remember);

  // buckets[i] = bucket of local row local_rows[i] of the partition, for i in [0, n).
  // Neighbouring rows may be equal.
  void Find(int64_t partition, const int32_t* local_rows, int64_t n, uint8_t* buckets) const;

 private:
  struct Free {
    void operator()(std::atomic<uint8_t>* rows) const { std::free(rows); }
  };

  void FindMissing(int64_t partition, std::atomic<uint8_t>* known, const int32_t* local_rows,
                   int64_t n, uint8_t* buckets) const;
  void Hash(int64_t partition, const int32_t* local_rows, int64_t n, uint8_t* buckets) const;

  BucketRule rule_;
  int64_t rows_per_partition_ = 0;
  // [partitions * rows_per_partition]: bucket + 1, or 0 where it is not known. Null: nothing is
  // remembered.
  std::unique_ptr<std::atomic<uint8_t>, Free> known_;
};

}  // namespace emberd::preprocess
