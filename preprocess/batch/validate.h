// Checks of a request's features, before any work is done with them.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "preprocess/batch/feature_input.h"

namespace emberd::preprocess {

// Samples of one stack in one batch, at most (the bound of JAX's sort keys).
inline constexpr int64_t kMaxStackSamples = (int64_t{1} << 26) - 1;

// OK if the sizes of the arrays fit together, samples are in order and in range, weights are finite
// and every id is in [0, vocabulary_size). Otherwise INVALID_ARGUMENT or OUT_OF_RANGE naming the
// feature, the position of the first offending value, the value and what is allowed.
absl::Status ValidateFeature(absl::string_view feature, int64_t vocabulary_size,
                             const FeatureInput& input);

}  // namespace emberd::preprocess
