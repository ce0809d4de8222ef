// The entries of a source slot by vocabulary bucket: how full the buckets are, what is dropped, and
// the slot's CSR cut into mini-batches.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "base/buffer.h"
#include "preprocess/batch/bucket_hash.h"
#include "preprocess/batch/bucket_memo.h"
#include "preprocess/batch/slot_csr.h"
#include "preprocess/batch/splits.h"

namespace emberd::preprocess {

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

struct SlotBuckets {
  static constexpr uint8_t kDropped = 255;

  Buffer<uint8_t> bucket;  // [cells of the uncut CSR]: 0 to 63, or kDropped
  Buffer<int32_t>
      multiplicity;  // [cells]: occurrences that merged into the entry; with dropping only
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

// The cuts that the slots of one stack need, by the rules of one system. `buckets` has one element
// per slot.
CutSet CutsOfStack(v1::PlanRules rules, const PartitionLimits& limits,
                   absl::Span<const SlotBuckets> buckets, int partitions);

// Cuts the uncut `csr` into mini-batches. Inside a (mini-batch, partition) entries are ordered by
// (bucket, local row, sample). Counters of `csr` are carried over.
void CutSlot(const SlotCsr& csr, const SlotBuckets& buckets, CutSet cuts,
             Buffer<int32_t>* positions, SlotCsr* cut);

}  // namespace emberd::preprocess
