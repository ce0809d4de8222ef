#include "preprocess/batch/sort_and_merge.h"

#include <algorithm>
#include <limits>

#include "base/floats.h"
#include "base/radix_sort.h"

namespace emberd::preprocess {
namespace {

// Below so many keys, clearing and summing counters costs more than a comparison sort.
constexpr int64_t kFewKeys = 48;

// Sample and gain of an occurrence of a group, by kind.
template <GainKind kind>
struct OccurrenceAt {
  OccurrenceAt(const KeyGroup& group, const Occurrences& occurrences)
      : low_mask((uint64_t{1} << group.low_bits) - 1),
        low_begin(group.low_begin),
        sample_gains(occurrences.sample_gains.data()),
        weighted(occurrences.weighted.data()) {}

  WeightedSample operator()(uint64_t key) const {
    const auto low = static_cast<int64_t>(key & low_mask) + low_begin;
    if constexpr (kind == GainKind::kPerOccurrence) return weighted[low];
    if constexpr (kind == GainKind::kPerSample)
      return {static_cast<int32_t>(low), sample_gains[low]};
    return {static_cast<int32_t>(low), 1.0f};
  }

  const uint64_t low_mask;
  const int64_t low_begin;
  const float* sample_gains;
  const WeightedSample* weighted;
};

// Merges equal keys of all groups into the cells of a slot, partition by partition.
template <GainKind kind, bool kCountOccurrences>
class Merger {
 public:
  Merger(const Occurrences& occurrences, std::vector<int64_t>& next, int32_t* multiplicity,
         SlotCsr* csr)
      : occurrences_(occurrences),
        next_(next),
        csr_(*csr),
        cells_{csr->embedding_ids.data(), csr->sample_ids.data(), csr->gains.data(), multiplicity} {
  }

  void Merge() {
    next_.clear();
    for (const KeyGroup& group : occurrences_.groups) next_.push_back(group.begin);
    int64_t entries = 0;
    for (int p = 0; p < csr_.partitions; ++p) {
      const int64_t begin = cell_;
      int32_t unique = 0;
      for (size_t g = 0; g < next_.size(); ++g) {
        unique += occurrences_.groups[g].narrow ? MergePartition<uint32_t>(p, g)
                                                : MergePartition<uint64_t>(p, g);
      }
      csr_.row_ends.data()[p] = static_cast<int32_t>(cell_);
      csr_.partition_ids.data()[p] = static_cast<int32_t>(cell_ - begin);
      csr_.partition_unique.data()[p] = unique;
      entries += cell_ - begin;
      cell_ = PadCells(&csr_, cell_);
    }
    csr_.cells = cell_;
    csr_.entries = entries;
    csr_.duplicates = occurrences_.count - entries;
  }

 private:
  struct Cells {
    int32_t* embedding_ids;
    int32_t* sample_ids;
    float* gains;
    int32_t* multiplicity;
  };

  // Merges the keys of partition p of the g-th group. Returns how many rows they have. Not inlined:
  // its loop needs the registers.
  template <typename Key>
  [[gnu::noinline]] int32_t MergePartition(int p, size_t g) {
    const KeyGroup& group = occurrences_.groups[g];
    // Copies: what is written could be any member, for all that the compiler knows.
    const auto row_offset = static_cast<int32_t>(group.row_offset);
    const uint64_t first = static_cast<uint64_t>(p) << group.row_bits;
    const uint64_t bound = static_cast<uint64_t>(p + 1) << group.row_bits;
    int32_t unique = 0;
    uint64_t row_before = ~uint64_t{0};
    int32_t sample_before = -1;
    const OccurrenceAt<kind> occurrence_at(group, occurrences_);
    const int low_bits = group.low_bits;
    const Key* const keys = occurrences_.keys.of<Key>().data();
    const Key* const end = keys + group.end;
    const Cells cells = cells_;
    int64_t cell = cell_;
    const Key* key = keys + next_[g];
    for (; key != end; ++key) {
      const uint64_t place = uint64_t{*key} >> low_bits;
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
    next_[g] = key - keys;
    cell_ = cell;
    return unique;
  }

  const Occurrences& occurrences_;
  std::vector<int64_t>& next_;
  SlotCsr& csr_;
  const Cells cells_;
  int64_t cell_ = 0;  // the next
};

template <GainKind kind>
void MergeKind(SlotScratch& scratch, Buffer<int32_t>* multiplicity, SlotCsr* csr) {
  if (multiplicity == nullptr) {
    Merger<kind, false>(scratch.occurrences, scratch.next, nullptr, csr).Merge();
  } else {
    Merger<kind, true>(scratch.occurrences, scratch.next, multiplicity->data(), csr).Merge();
  }
}

// Of keys that are sorted.
void MergeSorted(const StackShape& shape, SlotScratch& scratch, Buffer<int32_t>* multiplicity,
                 SlotCsr* csr) {
  // Every partition may need up to 7 pads.
  const int64_t cells =
      scratch.occurrences.count + (kCsrAlignment - 1) * shape.partitions + kCsrAlignment;
  csr->Reserve(cells, 1, static_cast<int>(shape.partitions));
  csr->minibatches = 1;
  csr->dropped = 0;
  if (multiplicity != nullptr) multiplicity->Reserve(cells);
  switch (scratch.occurrences.gain_kind) {
    case GainKind::kOne:
      return MergeKind<GainKind::kOne>(scratch, multiplicity, csr);
    case GainKind::kPerSample:
      return MergeKind<GainKind::kPerSample>(scratch, multiplicity, csr);
    case GainKind::kPerOccurrence:
      return MergeKind<GainKind::kPerOccurrence>(scratch, multiplicity, csr);
  }
}

template <typename Key>
void SortGroup(const KeyGroup& group, int partition_bits, SlotScratch& scratch) {
  const int64_t count = group.end - group.begin;
  Key* const keys = scratch.occurrences.keys.of<Key>().data() + group.begin;
  Key* const spare = scratch.spare_keys.of<Key>().Reserve(count);
  SortKeys(keys, spare, count, partition_bits + group.row_bits, group.low_bits);
}

// Gains may be finite each, and their sum not; or a divisor is so small that a quotient is not.
void NoteNonFinite(const SlotLayout& slot, SlotCsr* csr) {
  for (int p = 0; p < csr->partitions && csr->overflow.feature < 0; ++p) {
    const int64_t begin = csr->Begin(0, p);
    const int32_t* const samples = csr->sample_ids.data() + begin;
    const int64_t entries = csr->partition_ids.data()[p];
    const int64_t bad = FindNonFinite(absl::MakeConstSpan(csr->gains.data() + begin, entries));
    if (bad < 0) continue;
    for (const SlotSlice& slice : slot.slices) {
      if (samples[bad] < slice.slot_begin) break;
      csr->overflow = {slice.feature, slice.sample_begin + samples[bad] - slice.slot_begin,
                       /*of_gain=*/true};
    }
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

template <typename Key>
void SortKeys(Key* keys, Key* spare, int64_t n, int live_bits, int low_bits) {
  if (n < kFewKeys) {
    std::sort(keys, keys + n);
    return;
  }
  static_assert(kMaxLiveBits <= kMaxRadixBits);
  RadixSort(keys, spare, n, live_bits,
            [low_bits](Key key, int shift) { return uint64_t{key} >> (low_bits + shift); });
}

template void SortKeys(uint32_t* keys, uint32_t* spare, int64_t n, int live_bits, int low_bits);
template void SortKeys(uint64_t* keys, uint64_t* spare, int64_t n, int live_bits, int low_bits);

void SortSlot(const StackShape& shape, StackInputs inputs, const SlotLayout& slot, GainKind kind,
              SlotScratch* scratch, Buffer<int32_t>* multiplicity, SlotCsr* csr) {
  Occurrences& occurrences = scratch->occurrences;
  MakeGroups(shape, inputs, slot, kind, &occurrences);
  // Group by group, so that keys are sorted while a cache still has them.
  for (const KeyGroup& group : occurrences.groups) {
    MakeKeys(shape, inputs, group, &occurrences);
    if (group.narrow) {
      SortGroup<uint32_t>(group, shape.partition_bits(), *scratch);
    } else {
      SortGroup<uint64_t>(group, shape.partition_bits(), *scratch);
    }
  }
  csr->overflow = occurrences.overflow;
  MergeSorted(shape, *scratch, multiplicity, csr);
  if (kind != GainKind::kOne) NoteNonFinite(slot, csr);
}

}  // namespace emberd::preprocess
