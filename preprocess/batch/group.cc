#include "preprocess/batch/group.h"

namespace emberd::preprocess {
namespace {

// Sample and gain of an occurrence, by kind.
template <GainKind kind>
struct Lookup {
  explicit Lookup(const Occurrences& occurrences)
      : sample_gains(occurrences.sample_gains.data()), weighted(occurrences.weighted.data()) {}

  WeightedSample operator()(uint64_t key) const {
    const auto low = static_cast<uint32_t>(key);
    if constexpr (kind == GainKind::kPerOccurrence) return weighted[low];
    if constexpr (kind == GainKind::kPerSample)
      return {static_cast<int32_t>(low), sample_gains[low]};
    return {static_cast<int32_t>(low), 1.0f};
  }

  const float* sample_gains;
  const WeightedSample* weighted;
};

template <GainKind kind, bool kCountOccurrences>
void Group(const StackShape& shape, const Occurrences& occurrences, const uint64_t* sorted,
           int32_t* multiplicity, SlotCsr* csr) {
  const Lookup<kind> lookup(occurrences);
  const int row_bits = shape.row_bits();
  const uint64_t row_mask = (uint64_t{1} << row_bits) - 1;
  int32_t* embedding_ids = csr->embedding_ids.data();
  int32_t* sample_ids = csr->sample_ids.data();
  float* gains = csr->gains.data();
  int64_t cell = 0;
  int64_t i = 0;
  int64_t entries = 0;
  for (int64_t p = 0; p < shape.partitions; ++p) {
    const uint64_t bound = static_cast<uint64_t>(p + 1) << row_bits;
    const int64_t begin = cell;
    int32_t unique = 0;
    uint64_t row_before = ~uint64_t{0};
    int32_t sample_before = -1;
    for (; i < occurrences.count; ++i) {
      const uint64_t place = sorted[i] >> 32;
      if (place >= bound) break;
      const WeightedSample occurrence = lookup(sorted[i]);
      if (place == row_before && occurrence.sample == sample_before) {
        gains[cell - 1] += occurrence.gain;
        if constexpr (kCountOccurrences) ++multiplicity[cell - 1];
        continue;
      }
      unique += place != row_before;
      row_before = place;
      sample_before = occurrence.sample;
      embedding_ids[cell] = static_cast<int32_t>(place & row_mask);
      sample_ids[cell] = occurrence.sample;
      gains[cell] = occurrence.gain;
      if constexpr (kCountOccurrences) multiplicity[cell] = 1;
      ++cell;
    }
    csr->row_ends.data()[p] = static_cast<int32_t>(cell);
    csr->partition_ids.data()[p] = static_cast<int32_t>(cell - begin);
    csr->partition_unique.data()[p] = unique;
    entries += cell - begin;
    cell = PadCells(csr, cell);
  }
  csr->cells = cell;
  csr->entries = entries;
  csr->duplicates = occurrences.count - entries;
}

template <GainKind kind>
void GroupKind(const StackShape& shape, const Occurrences& occurrences, const uint64_t* sorted,
               Buffer<int32_t>* multiplicity, SlotCsr* csr) {
  if (multiplicity == nullptr) {
    Group<kind, false>(shape, occurrences, sorted, nullptr, csr);
  } else {
    Group<kind, true>(shape, occurrences, sorted, multiplicity->data(), csr);
  }
}

}  // namespace

void GroupSorted(const StackShape& shape, const Occurrences& occurrences, const uint64_t* sorted,
                 Buffer<int32_t>* multiplicity, SlotCsr* csr) {
  // Every partition may need up to 7 pads.
  const int64_t cells = occurrences.count + (kCsrAlignment - 1) * shape.partitions + kCsrAlignment;
  csr->Reserve(cells, 1, static_cast<int>(shape.partitions));
  csr->minibatches = 1;
  csr->dropped = 0;
  if (multiplicity != nullptr) multiplicity->Reserve(cells);
  switch (occurrences.gain_kind) {
    case GainKind::kOne:
      return GroupKind<GainKind::kOne>(shape, occurrences, sorted, multiplicity, csr);
    case GainKind::kPerSample:
      return GroupKind<GainKind::kPerSample>(shape, occurrences, sorted, multiplicity, csr);
    case GainKind::kPerOccurrence:
      return GroupKind<GainKind::kPerOccurrence>(shape, occurrences, sorted, multiplicity, csr);
  }
}

}  // namespace emberd::preprocess
