// What the kernels walk over. Plain values, so that a kernel knows nothing of batches and stores.
#pragma once

#include <cstdint>

namespace emberd::shard {

// One (sample, row) pair of a batch. `row` counts over the shard's partitions: k *
// rows_per_partition + local row.
struct Entry {
  uint32_t row;
  float gain;
};

// Kernels may prefetch this many entries beyond the last one; these name row 0.
inline constexpr int kEntryPadding = 128;

// One (row, sample) pair of a partition.
struct Touch {
  uint32_t row;  // local row of the partition
  // Index into StackEntries.samples, not the canonical number; the samples of all parts are counted
  // through, part after part.
  uint32_t sample;
  float gain;
};

// Kernels may prefetch this many touches beyond the last one; these are all zero.
inline constexpr int kTouchPadding = 128;

// A run of local rows with the same number of live columns; the same in every partition. Columns
// from `columns` on are padding and stay 0.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int columns = 0;
  int table = -1;  // index in StackSpec.tables; -1: rows of no table
};

}  // namespace emberd::shard
