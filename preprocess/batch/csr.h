// CSR-wrapped COO: how the entries of a batch lie in memory between preprocessing and the shards.
//
// For one stack of one replica there is a segment per (source slot, mini-batch). A segment holds
// the entries of all P partitions one after another; each partition starts at a multiple of 8 and
// the cells up to the next multiple are pads. Inside a (slot, mini-batch, partition) no (sample,
// row) pair stands twice. Formulas: jax-tpu-embedding's buffers (FillBufferSegment) and
// TensorFlow's GetMinibatchesInCsr.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace emberd::preprocess {

// Partitions start at multiples of this many cells.
inline constexpr int32_t kCsrAlignment = 8;
// What a pad cell holds in embedding_ids and sample_ids; its gain is NaN.
inline constexpr int32_t kCsrPadId = 2147483647;

// Rows that a partition of a stack can have: an int32 names a row of a partition, a uint32 one of
// all rows of the stack on a shard. `partitions` of it are on the shard: sparsecores_per_shard.
constexpr int64_t MaxRowsPerPartition(int partitions) {
  return std::min<int64_t>((int64_t{1} << 31) - 8, (int64_t{1} << 32) / partitions);
}

constexpr int64_t AlignCsr(int64_t index) {
  return (index + kCsrAlignment - 1) / kCsrAlignment * kCsrAlignment;
}

// A run of samples that are neighbours in a source slot and in the canonical order. The canonical
// order of the samples of a stack is (feature in order of row_offset, sample of the feature): it
// does not depend on the number of slots, and it is the order in which gradients are summed.
struct SampleSpan {
  int32_t slot_begin = 0;    // first sample id inside the slot
  int32_t sample_begin = 0;  // the same sample in canonical order
  int32_t count = 0;
};

// The part of one segment that falls into a run of neighbouring partitions (those of one shard).
// Entries of the run's k-th partition: indices [k == 0 ? base : AlignCsr(row_ends[k - 1]),
// row_ends[k]), from which `base` is subtracted to index the three arrays. Does not own memory.
struct CsrSegmentView {
  int32_t base = 0;
  absl::Span<const int32_t> row_ends;       // one per partition of the run; exact, unpadded ends
  absl::Span<const int32_t> embedding_ids;  // local row of the partition
  absl::Span<const int32_t> sample_ids;     // sample inside the source slot
  absl::Span<const float> gains;
};

// All that one shard needs of one stack of a batch. Does not own memory.
struct StackBatchView {
  int32_t stack = 0;         // index in the plan
  int32_t sample_count = 0;  // canonical samples of the stack
  int32_t slots = 0;         // source slots
  int32_t minibatches = 0;
  std::vector<CsrSegmentView> segments;             // slots * minibatches, slot-major
  std::vector<absl::Span<const SampleSpan>> spans;  // one list per slot, ascending slot_begin
  // Samples of each feature of the stack, in canonical order; sample_count in all. Batches of
  // several replicas are put together feature by feature.
  absl::Span<const int64_t> feature_samples;
  // Whether no sample has more than one entry on all shards together, or a gain other than 1: then
  // its sum is a row.
  bool single_rows = false;

  // Entries, and the cells that fill partitions up.
  int64_t cells() const {
    int64_t cells = 0;
    for (const CsrSegmentView& segment : segments) cells += std::ssize(segment.embedding_ids);
    return cells;
  }
};

}  // namespace emberd::preprocess
