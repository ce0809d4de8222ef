// Where the vocabulary of a batch is cut into mini-batches.
//
// Rows fall into 64 buckets. The possible cuts are the 63 places between neighbouring buckets,
// which both systems see as the inner nodes of a binary tree over the buckets: the node over
// buckets [i * 2^(k+1), (i+1) * 2^(k+1)) is the cut in its middle. Here a set of cuts is written
// flat; only at the borders is it in the numbering of one of the systems.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "preprocess/batch/bucket_hash.h"

namespace emberd::preprocess {

// Bit b, 1 <= b <= 63: buckets b - 1 and b lie in different mini-batches. Sets of several parties
// are OR-ed.
using CutSet = uint64_t;

// JAX numbers the nodes level by level from the leaves (32, 16, 8, 4, 2, 1 of them), from left to
// right.
CutSet CutsFromJaxMask(uint64_t mask);
uint64_t JaxMask(CutSet cuts);
// TensorFlow numbers them from the root: bit 2^level - 1 + section.
CutSet CutsFromTensorFlowMask(uint64_t mask);
uint64_t TensorFlowMask(CutSet cuts);

inline int MinibatchCount(CutSet cuts) { return __builtin_popcountll(cuts) + 1; }
// The mini-batch of a bucket: the number of cuts at or before it.
inline int MinibatchOf(CutSet cuts, int bucket) {
  return __builtin_popcountll(cuts & (~uint64_t{0} >> (63 - bucket)));
}

// Largest counts of one (source slot, partition) pair in one mini-batch; 0: no limit.
struct PartitionLimits {
  int64_t ids = 0;
  int64_t unique = 0;

  bool Exceeded(int64_t ids_there, int64_t unique_there) const {
    return (ids > 0 && ids_there > ids) || (unique > 0 && unique_there > unique);
  }
};

// JAX's cuts for the 64 bucket counts of one pair: from the leaves up, a node is cut if its halves
// together exceed the limit, and then counts as its larger half. limit 0: none.
CutSet JaxCuts(const int32_t* counts, int64_t limit);

// TensorFlow's cuts for one pair: from the root down, sections over a limit are halved, in
// `*tried`, which accumulates over the pairs of a batch in order of (slot, partition); of these
// cuts those stay that a greedy walk from the left needs.
CutSet TensorFlowCuts(const int32_t* ids, const int32_t* unique, const PartitionLimits& limits,
                      CutSet* tried);

}  // namespace emberd::preprocess
