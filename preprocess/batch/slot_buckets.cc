#include "preprocess/batch/slot_buckets.h"

#include <algorithm>
#include <cstring>

namespace emberd::preprocess {
namespace {

// Counts the cells [begin, end) of a partition into its 64 counters.
void CountAll(const SlotCsr& csr, int64_t begin, int64_t end, const uint8_t* bucket, int32_t* ids,
              int32_t* unique) {
  const int32_t* rows = csr.embedding_ids.data();
  // Ids in the lower half, unique ids in the upper. Two sets in turn, because a run of equal
  // buckets, as a hot row makes, would wait for its own counter.
  uint64_t counters[2][kBuckets] = {};
  int32_t row_before = -1;
  for (int64_t cell = begin; cell < end; ++cell) {
    const uint64_t one = 1 + (static_cast<uint64_t>(rows[cell] != row_before) << 32);
    counters[cell & 1][bucket[cell]] += one;
    row_before = rows[cell];
  }
  for (int b = 0; b < kBuckets; ++b) {
    const uint64_t both = counters[0][b] + counters[1][b];
    ids[b] = static_cast<int32_t>(both);
    unique[b] = static_cast<int32_t>(both >> 32);
  }
}

// The same by JAX's rule: all entries are counted, those beyond a limit are marked. Returns the
// dropped occurrences.
int64_t DropLikeJax(const SlotCsr& csr, int64_t begin, int64_t end, const PartitionLimits& limits,
                    SlotBuckets* buckets, int32_t* ids, int32_t* unique, int32_t* kept) {
  const int32_t* rows = csr.embedding_ids.data();
  uint8_t* buckets_of = buckets->bucket.data();
  int64_t dropped = 0;
  int32_t row_before = -1;
  for (int64_t cell = begin; cell < end; ++cell) {
    const uint8_t bucket = buckets_of[cell];
    unique[bucket] += rows[cell] != row_before;
    row_before = rows[cell];
    if (limits.Exceeded(++ids[bucket], unique[bucket])) {
      dropped += buckets->multiplicity.data()[cell];
      buckets_of[cell] = SlotBuckets::kDropped;
    } else {
      ++kept[bucket];
    }
  }
  return dropped;
}

// The same by TensorFlow's rule: a full bucket takes and counts nothing more. Returns the dropped
// entries.
int64_t DropLikeTensorFlow(const SlotCsr& csr, int64_t begin, int64_t end,
                           const PartitionLimits& limits, SlotBuckets* buckets, int32_t* ids,
                           int32_t* unique, int32_t* kept) {
  const int32_t* rows = csr.embedding_ids.data();
  uint8_t* buckets_of = buckets->bucket.data();
  int64_t dropped = 0;
  int32_t row_before = -1;
  for (int64_t cell = begin; cell < end; ++cell) {
    const uint8_t bucket = buckets_of[cell];
    if ((limits.ids > 0 && ids[bucket] >= limits.ids) ||
        (limits.unique > 0 && unique[bucket] >= limits.unique)) {
      ++dropped;
      buckets_of[cell] = SlotBuckets::kDropped;
      continue;
    }
    unique[bucket] += rows[cell] != row_before;
    row_before = rows[cell];
    ++ids[bucket];
    ++kept[bucket];
  }
  return dropped;
}

// Moves the cells [begin, end), which lie in one partition, to the next position of their bucket.
template <bool kDropping>
void Scatter(const SlotCsr& csr, int64_t begin, int64_t end, const uint8_t* bucket,
             int32_t* position, SlotCsr* cut) {
  const int32_t* rows = csr.embedding_ids.data();
  const int32_t* samples = csr.sample_ids.data();
  const float* gains = csr.gains.data();
  int32_t* rows_to = cut->embedding_ids.data();
  int32_t* samples_to = cut->sample_ids.data();
  float* gains_to = cut->gains.data();
  for (int64_t cell = begin; cell < end; ++cell) {
    if (kDropping && bucket[cell] == SlotBuckets::kDropped) continue;
    const int32_t to = position[bucket[cell]]++;
    rows_to[to] = rows[cell];
    samples_to[to] = samples[cell];
    gains_to[to] = gains[cell];
  }
}

// Row ends of the mini-batches, pads around them, and the first position of every (partition,
// bucket).
void PlacePartitions(const SlotBuckets& buckets, CutSet cuts, int32_t* positions, SlotCsr* cut) {
  const int32_t* kept = buckets.kept.data();
  int64_t cell = 0;
  int first_bucket = 0;
  for (int m = 0; m < cut->minibatches; ++m) {
    int end_bucket = first_bucket + 1;
    while (end_bucket < kBuckets && (cuts >> end_bucket & 1) == 0) ++end_bucket;
    for (int p = 0; p < cut->partitions; ++p) {
      for (int b = first_bucket; b < end_bucket; ++b) {
        positions[p * kBuckets + b] = static_cast<int32_t>(cell);
        cell += kept[p * kBuckets + b];
      }
      cut->row_ends.data()[int64_t{m} * cut->partitions + p] = static_cast<int32_t>(cell);
      cell = PadCells(cut, cell);
    }
    first_bucket = end_bucket;
  }
  cut->cells = cell;
}

}  // namespace

void FillBuckets(const BucketMemo& memo, const PartitionLimits& limits, DropRule drop,
                 const SlotCsr& csr, SlotBuckets* buckets) {
  const int64_t counters = int64_t{csr.partitions} * kBuckets;
  buckets->bucket.Reserve(csr.cells);
  int32_t* ids = buckets->ids.Reserve(counters);
  int32_t* unique = buckets->unique.Reserve(counters);
  int32_t* kept = buckets->kept.Reserve(counters);
  std::fill_n(ids, counters, 0);
  std::fill_n(unique, counters, 0);
  std::fill_n(kept, counters, 0);
  buckets->dropped = 0;
  const auto drop_some = drop == DropRule::kJax ? DropLikeJax : DropLikeTensorFlow;
  for (int p = 0; p < csr.partitions; ++p) {
    const int64_t begin = csr.Begin(0, p);
    const int64_t end = csr.End(0, p);
    const int64_t at = int64_t{p} * kBuckets;
    memo.Find(p, csr.embedding_ids.data() + begin, end - begin, buckets->bucket.data() + begin);
    if (drop == DropRule::kKeep) {
      CountAll(csr, begin, end, buckets->bucket.data(), ids + at, unique + at);
    } else {
      buckets->dropped +=
          drop_some(csr, begin, end, limits, buckets, ids + at, unique + at, kept + at);
    }
  }
  if (drop == DropRule::kKeep) std::copy_n(ids, counters, kept);
}

Overflow WorstOverflow(const SlotBuckets& buckets, int partitions, const PartitionLimits& limits) {
  Overflow worst;
  for (int p = 0; p < partitions; ++p) {
    for (int b = 0; b < kBuckets; ++b) {
      const int64_t ids = buckets.ids.data()[p * kBuckets + b];
      const int64_t unique = buckets.unique.data()[p * kBuckets + b];
      if (!limits.Exceeded(ids, unique)) continue;
      const int64_t excess = std::max(limits.ids > 0 ? ids - limits.ids : 0,
                                      limits.unique > 0 ? unique - limits.unique : 0);
      if (excess > worst.excess) worst = {p, b, ids, unique, excess};
    }
  }
  return worst;
}

CutSet CutsOfStack(v1::PlanRules rules, const PartitionLimits& limits,
                   absl::Span<const SlotBuckets> buckets, int partitions) {
  CutSet cuts = 0;
  CutSet tried = 0;
  for (const SlotBuckets& slot : buckets) {
    for (int p = 0; p < partitions; ++p) {
      const int32_t* ids = slot.ids.data() + p * kBuckets;
      const int32_t* unique = slot.unique.data() + p * kBuckets;
      if (rules == v1::TENSORFLOW) {
        cuts |= TensorFlowCuts(ids, unique, limits, &tried);
      } else {
        cuts |= JaxCuts(ids, limits.ids) | JaxCuts(unique, limits.unique);
      }
    }
  }
  return cuts;
}

void CutSlot(const SlotCsr& csr, const SlotBuckets& buckets, CutSet cuts,
             Buffer<int32_t>* positions, SlotCsr* cut) {
  const int minibatches = MinibatchCount(cuts);
  const int64_t max_pads = int64_t{kCsrAlignment - 1} * minibatches * csr.partitions;
  cut->Reserve(csr.entries + max_pads + kCsrAlignment, minibatches, csr.partitions);
  cut->minibatches = minibatches;
  int32_t* position = positions->Reserve(int64_t{csr.partitions} * kBuckets);
  PlacePartitions(buckets, cuts, position, cut);
  const auto scatter = buckets.dropped > 0 ? Scatter<true> : Scatter<false>;
  for (int p = 0; p < csr.partitions; ++p) {
    scatter(csr, csr.Begin(0, p), csr.End(0, p), buckets.bucket.data(), position + p * kBuckets,
            cut);
  }
  cut->entries = csr.entries;
  cut->duplicates = csr.duplicates;
  cut->dropped = buckets.dropped;
  std::copy_n(csr.partition_ids.data(), csr.partitions, cut->partition_ids.data());
  std::copy_n(csr.partition_unique.data(), csr.partitions, cut->partition_unique.data());
}

}  // namespace emberd::preprocess
