// The entries of one partition, row by row: what the backward pass walks.
#pragma once

#include <cstdint>

#include "shard/batch.h"
#include "shard/buffer_pool.h"

namespace emberd::shard {

// One (row, sample) pair of a partition.
struct Touch {
  uint32_t row;     // local row of the partition
  uint32_t sample;  // index into StackEntries.samples, not the canonical number
  float gain;
};

// Kernels may prefetch this many touches beyond the last one; these are all zero.
inline constexpr int kTouchPadding = 64;

// Touches of the shard's k-th partition by (row, canonical sample), and kTouchPadding more. LSD
// radix sort over the bits that local rows have.
PooledArray<Touch> OrderByRow(const StackEntries& stack, int k, int64_t rows_per_partition,
                              BufferPool& pool);

}  // namespace emberd::shard
