// How the samples of a stack's features are laid over the K source slots of a replica.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "emberd/v1/model.pb.h"

namespace emberd::preprocess {

// A run of one feature's samples in a source slot.
struct SlotSlice {
  int feature = 0;           // index in the stack's features
  int64_t sample_begin = 0;  // first sample of the feature
  int64_t count = 0;         // > 0
  int32_t slot_begin = 0;    // sample id of the first one inside the slot
};

// The slices of one source slot, ascending in slot_begin.
struct SlotLayout {
  std::vector<SlotSlice> slices;
  // Sample ids of the slot are 0 to samples - 1; ids that no slice covers have no entries.
  int32_t samples = 0;
};

// Lays `sample_counts` (one per feature, in canonical order) over `slots` slots. What does not
// divide is filled up with empty samples at the end: of every feature for SPLIT_THEN_STACK, of the
// whole stack for STACK_THEN_SPLIT. Reuses the memory of `layout`, which gets one entry per slot.
void LayOutSamples(v1::SampleLayout kind, absl::Span<const int64_t> sample_counts, int slots,
                   std::vector<SlotLayout>* layout);

}  // namespace emberd::preprocess
