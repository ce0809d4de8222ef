// One source slot from features to CSR: its keys are made and sorted, and equal ones merge.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffers.h"
#include "preprocess/batch/csr.h"
#include "preprocess/batch/keys.h"

namespace emberd::preprocess {

// The CSR of one source slot of one stack. Segments (mini-batches) follow one another in the three
// arrays; inside a segment, partitions do. All indices count from the start of the arrays.
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
  WeightOverflow overflow;
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

// Working memory of one task; keeps its size from task to task.
struct SlotScratch {
  Occurrences occurrences;
  KeyBuffers spare_keys;
  std::vector<int64_t> next;  // of each group, the first key that has not been merged
  SlotCsr csr;                // a slot that is being cut
  Buffer<int32_t> positions;  // while it is

  int64_t bytes() const {
    return occurrences.keys.bytes() + occurrences.sample_gains.bytes() +
           occurrences.weighted.bytes() + spare_keys.bytes() + csr.bytes() + positions.bytes();
  }
};

// Fills `csr` with the slot's entries as one mini-batch: (row, sample) pairs that are equal merge,
// their gains added in order of position; partitions are padded and counted. `multiplicity`, unless
// null, gets the number of occurrences of each cell.
void SortSlot(const StackShape& shape, StackInputs inputs, const SlotLayout& slot, GainKind kind,
              SlotScratch* scratch, Buffer<int32_t>* multiplicity, SlotCsr* csr);

// Bits of a partition, of at most 1024, and of a row of it, below 2^31.
inline constexpr int kMaxLiveBits = 41;

// Sorts n keys ascending by bits [low_bits, low_bits + live_bits), keeping the order of keys that
// are equal there; higher bits are zero and lower bits ascend. `spare` has room for n keys. LSD
// radix sort; passes in which all keys agree are left out. Keys are uint32_t or uint64_t.
template <typename Key>
void SortKeys(Key* keys, Key* spare, int64_t n, int live_bits, int low_bits);

}  // namespace emberd::preprocess
