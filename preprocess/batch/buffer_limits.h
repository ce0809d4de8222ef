// The buffers that a program sets aside for a batch, as a chip would: what does not fit them is
// refused or dropped. From TensorFlow's GetMinibatchesInCsr, whose chip is a replica here.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "preprocess/batch/preprocessed_batch.h"
#include "preprocess/plan/plan.h"

namespace emberd::preprocess {

struct BufferLimits {
  // By stack: cells of the buffer of ids, pads included, a multiple of 8. Empty: no limit.
  std::vector<int64_t> id_capacity;
  int max_minibatches = 0;  // 0: no limit
  // For errors: the ids per sample from which the capacities come, and whether ids are dropped.
  int ids_per_sample = 0;
  bool drop = false;
};

// RESOURCE_EXHAUSTED if a stack does not fit, with its name, count and capacity. With `drop`, what
// lies behind the end of its buffer is cut off and counted in SlotCsr::dropped instead; too many
// mini-batches are refused all the same.
absl::Status FitBuffers(const BufferLimits& limits, const Plan& plan,
                        std::vector<StackBatch>* stacks);

}  // namespace emberd::preprocess
