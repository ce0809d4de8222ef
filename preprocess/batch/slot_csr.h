// The CSR of one source slot of one stack, as preprocessing builds it.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "preprocess/batch/csr.h"

namespace emberd::preprocess {

// Segments (mini-batches) follow one another in the three arrays; inside a segment, partitions do.
// All indices count from the start of the arrays.
struct SlotCsr {
  Buffer<int32_t> embedding_ids;  // [cells]
  Buffer<int32_t> sample_ids;     // [cells]
  Buffer<float> gains;            // [cells]
  Buffer<int32_t> row_ends;       // [minibatches * partitions]: exact end of each partition
  int minibatches = 0;
  int partitions = 0;
  int64_t cells = 0;  // used, pads included

  // Counted before anything is dropped.
  int64_t entries = 0;     // distinct (sample, row) pairs
  int64_t duplicates = 0;  // occurrences that merged into an entry
  int64_t dropped = 0;
  Buffer<int32_t> partition_ids;     // [partitions] distinct (sample, row) pairs
  Buffer<int32_t> partition_unique;  // [partitions] distinct rows

  // First index of partition p of mini-batch m.
  int32_t Begin(int m, int p) const {
    const int64_t at = int64_t{m} * partitions + p;
    return at == 0 ? 0 : static_cast<int32_t>(AlignCsr(row_ends.data()[at - 1]));
  }
  int32_t End(int m, int p) const { return row_ends.data()[int64_t{m} * partitions + p]; }

  void Reserve(int64_t max_cells, int max_segments, int partition_count) {
    embedding_ids.Reserve(max_cells);
    sample_ids.Reserve(max_cells);
    gains.Reserve(max_cells);
    row_ends.Reserve(int64_t{max_segments} * partition_count);
    partition_ids.Reserve(partition_count);
    partition_unique.Reserve(partition_count);
    partitions = partition_count;
  }
  int64_t bytes() const {
    return embedding_ids.bytes() + sample_ids.bytes() + gains.bytes() + row_ends.bytes() +
           partition_ids.bytes() + partition_unique.bytes();
  }
};

// Writes pads from `cell` to the next multiple of 8, which is returned.
int64_t PadCells(SlotCsr* csr, int64_t cell);

}  // namespace emberd::preprocess
