#include "preprocess/batch/cuts.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "preprocess/batch/highway_buckets.h"

namespace emberd::preprocess {
namespace {

constexpr int64_t kBlock = 256;
constexpr int64_t kAhead = 32;  // rows prefetched
constexpr uint8_t kUnknown = 255;

using HighwayFunction = void (*)(int, uint32_t, const int32_t*, int64_t, uint8_t*);

HighwayFunction PickHighwayBuckets() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return HighwayBucketsAvx2;
#endif
  return HighwayBucketsPortable;
}

}  // namespace

void HighwayBucketsPortable(int partition_bits, uint32_t partition, const int32_t* local_rows,
                            int64_t n, uint8_t* buckets) {
  HighwayBuckets<highwayhash::HHStateT<HH_TARGET_Portable>>(partition_bits, partition, local_rows,
                                                            n, buckets);
}

BucketRule MakeBucketRule(v1::BucketHash hash, const StackShape& shape) {
  BucketRule rule;
  rule.hash = hash == v1::BUCKET_HASH_UNSPECIFIED ? v1::HIGHWAY_HASH : hash;
  rule.partition_bits = shape.partition_bits();
  rule.rows_per_bucket = std::max<int64_t>(
      1, RoundUp(shape.rows_per_partition * shape.partitions, kBuckets) / kBuckets);
  return rule;
}

void BucketsOf(const BucketRule& rule, int64_t partition, const int32_t* local_rows, int64_t n,
               uint8_t* buckets) {
  static const HighwayFunction highway_buckets = PickHighwayBuckets();
  const auto stacked_id = [&](int64_t i) {
    return static_cast<int64_t>(local_rows[i]) << rule.partition_bits | partition;
  };
  switch (rule.hash) {
    case v1::ID_RANGE:
      for (int64_t i = 0; i < n; ++i) {
        buckets[i] = static_cast<uint8_t>(
            std::min<int64_t>(stacked_id(i) / rule.rows_per_bucket, kBuckets - 1));
      }
      return;
    case v1::ID_MODULO:
      for (int64_t i = 0; i < n; ++i) buckets[i] = static_cast<uint8_t>(stacked_id(i) % kBuckets);
      return;
    case v1::LOCAL_ROW_MODULO:
      for (int64_t i = 0; i < n; ++i) buckets[i] = static_cast<uint8_t>(local_rows[i] % kBuckets);
      return;
    default:
      highway_buckets(rule.partition_bits, static_cast<uint32_t>(partition), local_rows, n,
                      buckets);
  }
}

BucketMemo::BucketMemo(const BucketRule& rule, const StackShape& shape, uint8_t* memory)
    : rule_(rule),
      rows_per_partition_(shape.rows_per_partition),
      known_(reinterpret_cast<std::atomic<uint8_t>*>(memory)) {
  static_assert(sizeof(std::atomic<uint8_t>) == 1 && std::atomic<uint8_t>::is_always_lock_free);
}

int64_t BucketMemo::BytesFor(const BucketRule& rule, const StackShape& shape) {
  if (rule.hash != v1::HIGHWAY_HASH) return 0;
  return shape.partitions * shape.rows_per_partition;
}

void BucketMemo::Find(int64_t partition, const int32_t* local_rows, int64_t n,
                      uint8_t* buckets) const {
  if (rule_.hash != v1::HIGHWAY_HASH) return BucketsOf(rule_, partition, local_rows, n, buckets);
  std::atomic<uint8_t>* known = nullptr;
  if (known_ != nullptr) known = known_ + partition * rows_per_partition_;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    bool missing = known == nullptr;
    if (missing) std::memset(buckets + begin, kUnknown, end - begin);
    for (int64_t i = missing ? end : begin; i < end; ++i) {
      if (i + kAhead < n) __builtin_prefetch(known + local_rows[i + kAhead], 1);
      const uint8_t found = known[local_rows[i]].load(std::memory_order_relaxed);
      missing |= found == 0;
      buckets[i] = static_cast<uint8_t>(found - 1);
    }
    if (missing) FindMissing(partition, known, local_rows + begin, end - begin, buckets + begin);
  }
}

// Hashes the rows of a block whose bucket is not known.
void BucketMemo::FindMissing(int64_t partition, std::atomic<uint8_t>* known,
                             const int32_t* local_rows, int64_t n, uint8_t* buckets) const {
  int32_t rows[kBlock] = {};
  uint8_t found[kBlock];
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool repeat = count > 0 && rows[count - 1] == local_rows[i];
    if (buckets[i] == kUnknown && !repeat) rows[count++] = local_rows[i];
  }
  BucketsOf(rule_, partition, rows, count, found);
  int64_t at = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (buckets[i] != kUnknown) continue;
    if (rows[at] != local_rows[i]) ++at;
    buckets[i] = found[at];
    if (known == nullptr) continue;
    known[local_rows[i]].store(static_cast<uint8_t>(found[at] + 1), std::memory_order_relaxed);
  }
}

// ---- Cuts

namespace {

// Sums of counts over ranges of buckets.
class RangeSums {
 public:
  explicit RangeSums(const int32_t* counts) {
    for (int b = 0; b < kBuckets; ++b) sums_[b + 1] = sums_[b] + counts[b];
  }
  int64_t operator()(int begin, int end) const { return sums_[end] - sums_[begin]; }

 private:
  std::array<int64_t, kBuckets + 1> sums_ = {};
};

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

// The same within limits: marks the entries beyond them, and returns how many were dropped. By
// JAX's rule all entries are counted, and each that is dropped as often as it occurs; by
// TensorFlow's a full bucket takes and counts nothing more.
template <bool kLikeJax>
int64_t Drop(const SlotCsr& csr, int64_t begin, int64_t end, const PartitionLimits& limits,
             SlotBuckets* buckets, int32_t* ids, int32_t* unique, int32_t* kept) {
  const int32_t* rows = csr.embedding_ids.data();
  uint8_t* buckets_of = buckets->bucket.data();
  int64_t dropped = 0;
  int32_t row_before = -1;
  for (int64_t cell = begin; cell < end; ++cell) {
    const uint8_t bucket = buckets_of[cell];
    const bool full = !kLikeJax && ((limits.ids > 0 && ids[bucket] >= limits.ids) ||
                                    (limits.unique > 0 && unique[bucket] >= limits.unique));
    if (!full) {
      ++ids[bucket];
      unique[bucket] += rows[cell] != row_before;
      row_before = rows[cell];
    }
    if (kLikeJax ? limits.Exceeded(ids[bucket], unique[bucket]) : full) {
      dropped += kLikeJax ? buckets->multiplicity.data()[cell] : 1;
      buckets_of[cell] = SlotBuckets::kDropped;
    } else {
      ++kept[bucket];
    }
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

// The table that holds most of the entries of the overfull bucket.
const TablePlan& MainTable(const StackPlan& stack, const SlotCsr& csr, const SlotBuckets& buckets,
                           const Overflow& overflow) {
  std::vector<int64_t> entries(stack.tables.size());
  for (int64_t cell = csr.Begin(0, overflow.partition); cell < csr.End(0, overflow.partition);
       ++cell) {
    if (buckets.bucket.data()[cell] != overflow.bucket) continue;
    size_t table = stack.tables.size() - 1;
    while (csr.embedding_ids.data()[cell] < stack.tables[table].row_offset) --table;
    ++entries[table];
  }
  return stack.tables[std::max_element(entries.begin(), entries.end()) - entries.begin()];
}

// `first` gives the bit of a level's first node; levels are counted from the leaves.
template <class First>
uint64_t MaskOf(CutSet cuts, const First& first) {
  uint64_t mask = 0;
  for (int cut = 1; cut < kBuckets; ++cut) {
    const int level = __builtin_ctz(cut);
    mask |= (cuts >> cut & 1) << (first(level) + (cut >> (level + 1)));
  }
  return mask;
}

std::string Comparison(const char* what, const char* field, int64_t count, int64_t limit) {
  if (limit == 0 || count <= limit) return "";
  return absl::StrCat(" ", count, " ", what, " (", field, " is ", limit, ")");
}

}  // namespace

uint64_t JaxMask(CutSet cuts) {
  return MaskOf(cuts, [](int level) { return kBuckets - (kBuckets >> level); });
}

uint64_t TensorFlowMask(CutSet cuts) {
  return MaskOf(cuts, [](int level) { return (kBuckets >> (level + 1)) - 1; });
}

CutSet JaxCuts(const int32_t* counts, int64_t limit) {
  if (limit <= 0 || std::accumulate(counts, counts + kBuckets, int64_t{0}) <= limit) return 0;
  std::array<int64_t, kBuckets> value;
  std::copy(counts, counts + kBuckets, value.begin());
  CutSet cuts = 0;
  for (int half = 1; half < kBuckets; half *= 2) {
    for (int left = 0; left < kBuckets; left += 2 * half) {
      const int64_t a = value[left];
      const int64_t b = value[left + half];
      value[left] = a + b;
      if (a + b > limit) {
        cuts |= CutSet{1} << (left + half);
        value[left] = std::max(a, b);
      }
    }
  }
  return cuts;
}

CutSet TensorFlowCuts(const int32_t* ids, const int32_t* unique, const PartitionLimits& limits,
                      CutSet* tried) {
  const RangeSums ids_in(ids);
  const RangeSums unique_in(unique);
  const auto exceeded = [&](int begin, int end) {
    return limits.Exceeded(ids_in(begin, end), unique_in(begin, end));
  };
  for (int size = kBuckets; size > 1; size /= 2) {
    for (int begin = 0; begin < kBuckets; begin += size) {
      // The parent of a section is cut where the two siblings meet.
      const int parent = begin / (2 * size) * (2 * size) + size;
      const bool reached = size == kBuckets || (*tried >> parent & 1) != 0;
      if (reached && exceeded(begin, begin + size)) *tried |= CutSet{1} << (begin + size / 2);
    }
  }
  CutSet cuts = 0;
  int start = 0;
  int before = 0;
  for (int boundary = 1; boundary <= kBuckets; ++boundary) {
    if (boundary < kBuckets && (*tried >> boundary & 1) == 0) continue;
    if (before != start && exceeded(start, boundary)) {
      cuts |= CutSet{1} << before;
      start = before;
    }
    before = boundary;
  }
  return cuts;
}

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
  const auto drop_some = drop == DropRule::kJax ? Drop<true> : Drop<false>;
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

absl::Status OverflowError(const StackPlan& stack, const PartitionLimits& limits, int slot,
                           const SlotCsr& csr, const SlotBuckets& buckets,
                           const Overflow& overflow) {
  const std::string ids = Comparison("ids", "max_ids_per_partition", overflow.ids, limits.ids);
  const std::string unique =
      Comparison("unique ids", "max_unique_ids_per_partition", overflow.unique, limits.unique);
  return absl::ResourceExhaustedError(
      absl::StrCat("table '", MainTable(stack, csr, buckets, overflow).name, "' (stack '",
                   stack.name, "'): partition ", overflow.partition, " gets", ids,
                   ids.empty() || unique.empty() ? "" : " and", unique, " from source slot ", slot,
                   " in the smallest mini-batch that the vocabulary can be cut into",
                   "; raise the limit to at least the count, send fewer samples per request, use "
                   "more SparseCores per "
                   "shard, or set plan.allow_id_dropping"));
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
