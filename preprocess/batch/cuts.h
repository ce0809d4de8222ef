// Where the vocabulary of a batch is cut into mini-batches, and the cutting. The Preprocessor calls
// it when a batch of the step passes its limits.
//
// The rows of a stack fall into 64 buckets. The possible cuts are the 63 places between
// neighbouring buckets. The two systems that emberd follows, jax-tpu-embedding ("JAX") and
// TensorFlow, see these as the inner nodes of a binary tree over the buckets: the node over buckets
// [i * 2^(k+1), (i+1) * 2^(k+1)) is the cut in its middle. Here a set of cuts is written flat; only
// at the borders is it in the numbering of one of the systems.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "emberd/v1/model.pb.h"
#include "preprocess/batch/sort_and_merge.h"
#include "preprocess/plan/plan.h"

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

// Bit b, 1 <= b <= 63: buckets b - 1 and b lie in different mini-batches. Sets of several parties
// are OR-ed.
using CutSet = uint64_t;

// JAX numbers the nodes level by level from the leaves (32, 16, 8, 4, 2, 1 of them), from left to
// right.
uint64_t JaxMask(CutSet cuts);
// TensorFlow numbers them from the root: bit 2^level - 1 + section.
uint64_t TensorFlowMask(CutSet cuts);

inline int MinibatchCount(CutSet cuts) { return __builtin_popcountll(cuts) + 1; }
// The mini-batch of a bucket: the number of cuts at or before it.
inline int MinibatchOf(CutSet cuts, int bucket) {
  return __builtin_popcountll(cuts & (~uint64_t{0} >> (63 - bucket)));
}

// JAX's cuts for the 64 bucket counts of one pair: from the leaves up, a node is cut if its halves
// together exceed the limit, and then counts as its larger half. limit 0: none.
CutSet JaxCuts(const int32_t* counts, int64_t limit);

// TensorFlow's cuts for one pair: from the root down, sections over a limit are halved, in
// `*tried`, which accumulates over the pairs of a batch in order of (slot, partition); of these
// cuts those stay that a greedy walk from the left needs.
CutSet TensorFlowCuts(const int32_t* ids, const int32_t* unique, const PartitionLimits& limits,
                      CutSet* tried);

// What happens to entries of a (partition, bucket) beyond its limits.
enum class DropRule {
  kKeep,  // they stay; the caller refuses the batch or cuts it
  // JAX: an entry goes if its ordinal among the bucket's entries exceeds the limit of ids, or its
  // row's ordinal among the rows exceeds the limit of unique ids. Every occurrence that merged into
  // a dropped entry counts as dropped; the bucket's counts take in what was dropped.
  kJax,
  // TensorFlow: an entry goes if the bucket already holds as many entries or rows as allowed, even
  // if its own row is among them. Counts are those of entries, and of what was kept.
  kTensorFlow,
};

// The entries of a source slot by vocabulary bucket: where each is, and how full the buckets are.
struct SlotBuckets {
  static constexpr uint8_t kDropped = 255;

  Buffer<uint8_t> bucket;  // [cells of the uncut CSR]: 0 to 63, or kDropped
  // [cells]: occurrences that merged into the entry; with dropping only.
  Buffer<int32_t> multiplicity;
  // Of every (partition, bucket): [partitions * 64].
  Buffer<int32_t> ids;     // see DropRule
  Buffer<int32_t> unique;  // see DropRule
  Buffer<int32_t> kept;    // ids after dropping
  int64_t dropped = 0;     // see DropRule

  int64_t bytes() const {
    return bucket.bytes() + multiplicity.bytes() + ids.bytes() + unique.bytes() + kept.bytes();
  }
};

// Fills `buckets` from a slot's uncut CSR. With a rule other than kKeep, `buckets->multiplicity`
// must be filled.
void FillBuckets(const BucketMemo& memo, const PartitionLimits& limits, DropRule drop,
                 const SlotCsr& csr, SlotBuckets* buckets);

// Where the limits of one (partition, bucket) are exceeded most.
struct Overflow {
  int partition = -1;
  int bucket = -1;
  int64_t ids = 0;
  int64_t unique = 0;
  int64_t excess = 0;  // over the limit that is exceeded more
  bool found() const { return partition >= 0; }
};
Overflow WorstOverflow(const SlotBuckets& buckets, int partitions, const PartitionLimits& limits);

// RESOURCE_EXHAUSTED: names the table with most of the offending entries, the partition, the source
// slot, counts, limits and the ways out. `csr` and `buckets` are those of source slot `slot`.
absl::Status OverflowError(const StackPlan& stack, const PartitionLimits& limits, int slot,
                           const SlotCsr& csr, const SlotBuckets& buckets,
                           const Overflow& overflow);

// The cuts that the slots of one stack need, by the rules of one system. `buckets` has one element
// per slot.
CutSet CutsOfStack(v1::PlanRules rules, const PartitionLimits& limits,
                   absl::Span<const SlotBuckets> buckets, int partitions);

// Cuts the uncut `csr` into mini-batches. Inside a (mini-batch, partition) entries are ordered by
// (bucket, local row, sample). Counters of `csr` are carried over.
void CutSlot(const SlotCsr& csr, const SlotBuckets& buckets, CutSet cuts,
             Buffer<int32_t>* positions, SlotCsr* cut);

}  // namespace emberd::preprocess
