#include "preprocess/batch/sample_layout.h"

#include <algorithm>

#include "preprocess/plan/placement.h"

namespace emberd::preprocess {
namespace {

void AddSlice(int feature, int64_t begin, int64_t count, int64_t slot_begin, SlotLayout* slot) {
  if (count <= 0) return;
  slot->slices.push_back({feature, begin, count, static_cast<int32_t>(slot_begin)});
}

void SplitThenStack(absl::Span<const int64_t> counts, int slots, std::vector<SlotLayout>* layout) {
  int64_t slot_begin = 0;
  for (size_t f = 0; f < counts.size(); ++f) {
    const int64_t per_slot = RoundUp(counts[f], slots) / slots;
    for (int s = 0; s < slots; ++s) {
      const int64_t begin = s * per_slot;
      AddSlice(static_cast<int>(f), begin, std::min(per_slot, counts[f] - begin), slot_begin,
               &(*layout)[s]);
    }
    slot_begin += per_slot;
  }
  for (SlotLayout& slot : *layout) slot.samples = static_cast<int32_t>(slot_begin);
}

void StackThenSplit(absl::Span<const int64_t> counts, int slots, std::vector<SlotLayout>* layout) {
  int64_t total = 0;
  for (int64_t count : counts) total += count;
  const int64_t per_slot = RoundUp(total, slots) / slots;
  for (int s = 0; s < slots; ++s) {
    const int64_t slot_first = s * per_slot;
    const int64_t slot_last = slot_first + per_slot;
    int64_t feature_first = 0;
    for (size_t f = 0; f < counts.size(); ++f) {
      const int64_t first = std::max(feature_first, slot_first);
      const int64_t last = std::min(feature_first + counts[f], slot_last);
      AddSlice(static_cast<int>(f), first - feature_first, last - first, first - slot_first,
               &(*layout)[s]);
      feature_first += counts[f];
    }
    (*layout)[s].samples = static_cast<int32_t>(per_slot);
  }
}

}  // namespace

void LayOutSamples(v1::SampleLayout kind, absl::Span<const int64_t> sample_counts, int slots,
                   std::vector<SlotLayout>* layout) {
  layout->resize(slots);
  for (SlotLayout& slot : *layout) slot.slices.clear();
  if (kind == v1::STACK_THEN_SPLIT) {
    StackThenSplit(sample_counts, slots, layout);
  } else {
    SplitThenStack(sample_counts, slots, layout);
  }
}

}  // namespace emberd::preprocess
