// Features to COO: one sort key per id of a source slot.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "preprocess/batch/sample_layout.h"
#include "preprocess/batch/stack_shape.h"

namespace emberd::preprocess {

// Where the gain of an occurrence is found.
enum class GainKind {
  kOne,            // every gain is 1
  kPerSample,      // all occurrences of a sample have the same gain
  kPerOccurrence,  // weights differ inside a sample
};

// An occurrence whose weight is its own.
struct WeightedSample {
  int32_t sample;
  float gain;
};

// The occurrences of one slot, in canonical order. A key is
//   bits 63..32: partition << row_bits | local row;  bits 31..0: sample id in the slot, or, for
//   kPerOccurrence, the ordinal of the occurrence, under which `weighted` holds its sample and
//   gain.
// Samples ascend, so a stable sort by the upper half alone orders keys as (partition, local row,
// sample, position).
struct Occurrences {
  GainKind gain_kind = GainKind::kOne;
  int64_t count = 0;
  Buffer<uint64_t> keys;
  Buffer<float> sample_gains;       // [samples of the slot], kPerSample
  Buffer<WeightedSample> weighted;  // [count], kPerOccurrence
};

// The simplest kind that fits all features of the stack, so that all of its slots agree.
GainKind GainKindOf(const StackShape& shape, StackInputs inputs);

// Ids in the slot.
int64_t CountIds(const SlotLayout& slot, StackInputs inputs);

// Fills `out` with the ids of the slot.
void ExtractSlot(const StackShape& shape, StackInputs inputs, const SlotLayout& slot, GainKind kind,
                 Occurrences* out);

}  // namespace emberd::preprocess
