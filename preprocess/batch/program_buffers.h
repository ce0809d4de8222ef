// How large the buffers are that a compiled lookup sets aside on a chip. From TensorFlow's
// GetMinibatchesInCsr.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "preprocess/plan/plan.h"

namespace emberd::preprocess {

// Of programs that say nothing else.
inline constexpr int kDefaultIdsPerSample = 64;
inline constexpr int kMaxProgramMinibatches = 64;

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
