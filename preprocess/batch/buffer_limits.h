// The buffers that are set aside for a batch, as on a chip: what does not fit them is refused or
// dropped. From TensorFlow's GetMinibatchesInCsr, whose chip is a replica here.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "preprocess/batch/preprocessed_batch.h"
#include "preprocess/plan/plan.h"

namespace emberd::preprocess {

// RESOURCE_EXHAUSTED if a stack does not fit, with its name, count and capacity; `limits`: by
// stack. With `drop`, what lies behind the end of its buffer is cut off and counted in
// SlotCsr::dropped instead; too many mini-batches are refused all the same. Says in any case what
// each stack needs for each sample.
absl::Status FitBuffers(const std::vector<PartitionLimits>& limits, bool drop, const Plan& plan,
                        std::vector<StackBatch>* stacks);

// One stack of a batch as TensorFlow gives it to a chip, whose source slots follow one another: the
// parts of its buffers that are used.
struct ChipCsr {
  // For each (source slot, mini-batch), slot-major, AlignCsr(P) pointers: the exact end of each
  // partition, then the begin of what follows.
  std::vector<int32_t> row_pointers;
  std::vector<int32_t> sample_ids;  // sample inside the source slot; kCsrPadId in pads
  std::vector<int32_t> token_ids;   // local row of the partition; kCsrPadId in pads
  std::vector<float> gains;         // 2147483648.0 in pads
};
ChipCsr MakeChipCsr(absl::Span<const SlotCsr> slots);

// How large the buffers are that a compiled lookup sets aside on a chip. From TensorFlow's
// GetMinibatchesInCsr.

// Of one stack.
struct ProgramBuffers {
  int64_t samples = 0;          // at most
  int64_t id_capacity = 0;      // cells of the buffer of ids, a multiple of 8
  int64_t row_pointers = 0;     // cells of the buffer of row pointers
  int64_t activation_rows = 0;  // of each SparseCore
  int64_t bytes_per_sparsecore = 0;
};

// `samples[f]`: of feature f of the config, at most.
ProgramBuffers SizeProgramBuffers(const Plan& plan, const StackPlan& stack,
                                  absl::Span<const int64_t> samples, int64_t ids_per_sample,
                                  int64_t minibatches);

}  // namespace emberd::preprocess
