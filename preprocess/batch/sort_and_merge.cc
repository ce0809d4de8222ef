#include "preprocess/batch/sort_and_merge.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

namespace emberd::preprocess {
namespace {

constexpr int kMaxDigitBits = 11;  // 2,048 counters of 4 bytes stay in the first-level cache
constexpr int kMaxPasses = 6;      // kMaxLiveBits in digits of 8 or more
// Below so many keys, clearing and summing counters costs more than a comparison sort.
constexpr int64_t kFewKeys = 48;
// Below so many, three passes over small counters beat two over large ones.
constexpr int64_t kSomeKeys = 1024;
constexpr int kSmallDigitBits = 8;

using Counters = std::array<uint32_t, 1 << kMaxDigitBits>;

void Count(const uint64_t* keys, int64_t n, int low_bits, int passes, int digit_bits,
           Counters* counters) {
  const uint64_t mask = (uint64_t{1} << digit_bits) - 1;
  for (int pass = 0; pass < passes; ++pass) {
    std::memset(counters[pass].data(), 0, sizeof(uint32_t) << digit_bits);
  }
  for (int64_t i = 0; i < n; ++i) {
    uint64_t rest = keys[i] >> low_bits;
    for (int pass = 0; pass < passes; ++pass, rest >>= digit_bits) ++counters[pass][rest & mask];
  }
}

// Counts to first positions; false if one digit value has all n keys.
bool SumUp(int64_t n, int digit_bits, Counters* counters) {
  uint32_t position = 0;
  for (int value = 0; value < 1 << digit_bits; ++value) {
    const uint32_t count = (*counters)[value];
    if (count == n) return false;
    (*counters)[value] = position;
    position += count;
  }
  return true;
}

// Sample and gain of an occurrence, by kind.
template <GainKind kind>
struct OccurrenceAt {
  OccurrenceAt(const StackShape& shape, const Occurrences& occurrences)
      : low_mask((uint64_t{1} << shape.sample_bits()) - 1),
        sample_gains(occurrences.sample_gains.data()),
        weighted(occurrences.weighted.data()) {}

  WeightedSample operator()(uint64_t key) const {
    const auto low = static_cast<uint32_t>(key & low_mask);
    if constexpr (kind == GainKind::kPerOccurrence) return weighted[low];
    if constexpr (kind == GainKind::kPerSample)
      return {static_cast<int32_t>(low), sample_gains[low]};
    return {static_cast<int32_t>(low), 1.0f};
  }

  const uint64_t low_mask;
  const float* sample_gains;
  const WeightedSample* weighted;
};

// Merges equal keys of all groups into the cells of a slot, partition by partition.
template <GainKind kind, bool kCountOccurrences>
class Merger {
 public:
  Merger(const StackShape& shape, const Occurrences& occurrences, int32_t* multiplicity,
         SlotCsr* csr)
      : occurrence_at_(shape, occurrences),
        sample_bits_(shape.sample_bits()),
        csr_(*csr),
        cells_{csr->embedding_ids.data(), csr->sample_ids.data(), csr->gains.data(), multiplicity} {
  }

  void Merge(int64_t count, absl::Span<SortedGroup> groups) {
    int64_t entries = 0;
    for (int p = 0; p < csr_.partitions; ++p) {
      const int64_t begin = cell_;
      int32_t unique = 0;
      for (SortedGroup& group : groups) unique += MergePartition(p, &group);
      csr_.row_ends.data()[p] = static_cast<int32_t>(cell_);
      csr_.partition_ids.data()[p] = static_cast<int32_t>(cell_ - begin);
      csr_.partition_unique.data()[p] = unique;
      entries += cell_ - begin;
      cell_ = PadCells(&csr_, cell_);
    }
    csr_.cells = cell_;
    csr_.entries = entries;
    csr_.duplicates = count - entries;
  }

 private:
  struct Cells {
    int32_t* embedding_ids;
    int32_t* sample_ids;
    float* gains;
    int32_t* multiplicity;
  };

  // Moves `group` beyond its keys of partition p. Returns how many rows they have. Not inlined: its
  // loop needs the registers.
  [[gnu::noinline]] int32_t MergePartition(int p, SortedGroup* group) {
    const int row_bits = group->keys->row_bits;
    const auto row_offset = static_cast<int32_t>(group->keys->row_offset);
    const uint64_t first = static_cast<uint64_t>(p) << row_bits;
    const uint64_t bound = static_cast<uint64_t>(p + 1) << row_bits;
    int32_t unique = 0;
    uint64_t row_before = ~uint64_t{0};
    int32_t sample_before = -1;
    // What is written could be any member, for all that the compiler knows.
    const OccurrenceAt<kind> occurrence_at = occurrence_at_;
    const int sample_bits = sample_bits_;
    const uint64_t* const end = group->end;
    const Cells cells = cells_;
    int64_t cell = cell_;
    const uint64_t* key = group->next;
    for (; key != end; ++key) {
      const uint64_t place = *key >> sample_bits;
      if (place >= bound) break;
      const WeightedSample occurrence = occurrence_at(*key);
      if (place == row_before && occurrence.sample == sample_before) {
        cells.gains[cell - 1] += occurrence.gain;
        if constexpr (kCountOccurrences) ++cells.multiplicity[cell - 1];
        continue;
      }
      unique += place != row_before;
      row_before = place;
      sample_before = occurrence.sample;
      cells.embedding_ids[cell] = static_cast<int32_t>(place - first) + row_offset;
      cells.sample_ids[cell] = occurrence.sample;
      cells.gains[cell] = occurrence.gain;
      if constexpr (kCountOccurrences) cells.multiplicity[cell] = 1;
      ++cell;
    }
    group->next = key;
    cell_ = cell;
    return unique;
  }

  const OccurrenceAt<kind> occurrence_at_;
  const int sample_bits_;
  SlotCsr& csr_;
  const Cells cells_;
  int64_t cell_ = 0;  // the next
};

template <GainKind kind>
void MergeKind(const StackShape& shape, const Occurrences& occurrences,
               absl::Span<SortedGroup> sorted, Buffer<int32_t>* multiplicity, SlotCsr* csr) {
  if (multiplicity == nullptr) {
    Merger<kind, false>(shape, occurrences, nullptr, csr).Merge(occurrences.count, sorted);
  } else {
    Merger<kind, true>(shape, occurrences, multiplicity->data(), csr)
        .Merge(occurrences.count, sorted);
  }
}

// Uses `sorted` up.
void MergeSorted(const StackShape& shape, const Occurrences& occurrences,
                 absl::Span<SortedGroup> sorted, Buffer<int32_t>* multiplicity, SlotCsr* csr) {
  // Every partition may need up to 7 pads.
  const int64_t cells = occurrences.count + (kCsrAlignment - 1) * shape.partitions + kCsrAlignment;
  csr->Reserve(cells, 1, static_cast<int>(shape.partitions));
  csr->minibatches = 1;
  csr->dropped = 0;
  if (multiplicity != nullptr) multiplicity->Reserve(cells);
  switch (occurrences.gain_kind) {
    case GainKind::kOne:
      return MergeKind<GainKind::kOne>(shape, occurrences, sorted, multiplicity, csr);
    case GainKind::kPerSample:
      return MergeKind<GainKind::kPerSample>(shape, occurrences, sorted, multiplicity, csr);
    case GainKind::kPerOccurrence:
      return MergeKind<GainKind::kPerOccurrence>(shape, occurrences, sorted, multiplicity, csr);
  }
}

}  // namespace

int64_t PadCells(SlotCsr* csr, int64_t cell) {
  const int64_t end = AlignCsr(cell);
  for (; cell < end; ++cell) {
    csr->embedding_ids.data()[cell] = kCsrPadId;
    csr->sample_ids.data()[cell] = kCsrPadId;
    csr->gains.data()[cell] = std::numeric_limits<float>::quiet_NaN();
  }
  return end;
}

uint64_t* SortKeys(uint64_t* keys, uint64_t* spare, int64_t n, int live_bits, int low_bits) {
  if (n < kFewKeys) {
    std::sort(keys, keys + n);
    return keys;
  }
  const int most_bits = n < kSomeKeys ? kSmallDigitBits : kMaxDigitBits;
  const int passes = std::max(1, (live_bits + most_bits - 1) / most_bits);
  const int digit_bits = std::max(1, (live_bits + passes - 1) / passes);
  static_assert(kMaxPasses * kSmallDigitBits >= kMaxLiveBits);
  Counters counters[kMaxPasses];
  Count(keys, n, low_bits, passes, digit_bits, counters);
  const uint64_t mask = (uint64_t{1} << digit_bits) - 1;
  for (int pass = 0; pass < passes; ++pass) {
    if (!SumUp(n, digit_bits, &counters[pass])) continue;
    const int shift = low_bits + pass * digit_bits;
    uint32_t* position = counters[pass].data();
    for (int64_t i = 0; i < n; ++i) spare[position[keys[i] >> shift & mask]++] = keys[i];
    std::swap(keys, spare);
  }
  return keys;
}

void SortSlot(const StackShape& shape, StackInputs inputs, const SlotLayout& slot, GainKind kind,
              SlotScratch* scratch, Buffer<int32_t>* multiplicity, SlotCsr* csr) {
  Occurrences& occurrences = scratch->occurrences;
  MakeKeys(shape, inputs, slot, kind, &occurrences);
  csr->overflow = occurrences.overflow;
  uint64_t* const keys = occurrences.keys.data();
  uint64_t* const spare = scratch->spare_keys.Reserve(occurrences.count);
  scratch->sorted.clear();
  for (const KeyGroup& group : occurrences.groups) {
    const int64_t count = group.end - group.begin;
    const uint64_t* const sorted =
        SortKeys(keys + group.begin, spare + group.begin, count,
                 shape.partition_bits() + group.row_bits, shape.sample_bits());
    scratch->sorted.push_back({&group, sorted, sorted + count});
  }
  MergeSorted(shape, occurrences, absl::MakeSpan(scratch->sorted), multiplicity, csr);
}

}  // namespace emberd::preprocess
