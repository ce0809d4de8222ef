// One feature of a request as preprocessing sees it: spans over the caller's memory, any id width,
// any form; and the checks of it, before any work is done.
#pragma once

#include <cstdint>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace emberd::preprocess {

// Ids, row splits or sparse indices in the width in which they came.
using IntSpan = std::variant<absl::Span<const int32_t>, absl::Span<const int64_t>>;

struct DenseInput {
  IntSpan ids;                 // samples * ids_per_sample, row-major
  int64_t ids_per_sample = 1;  // >= 0
  int64_t sample_count = 0;
};
struct SparseInput {
  IntSpan indices;  // n pairs (sample, position); samples non-decreasing
  IntSpan values;   // n ids
  int64_t sample_count = 0;
};
struct RaggedInput {
  IntSpan row_splits;  // samples + 1
  IntSpan values;
};

struct FeatureInput {
  std::variant<DenseInput, SparseInput, RaggedInput> ids;
  bool has_weights = false;
  absl::Span<const float> weights;  // one per id, or a single one for all
};

// Samples of one stack in one batch, at most (the bound of JAX's sort keys).
inline constexpr int64_t kMaxStackSamples = (int64_t{1} << 26) - 1;

// OK if the sizes of the arrays fit together, samples are in order and in range, weights are finite
// and every id is in [0, vocabulary_size). Otherwise INVALID_ARGUMENT or OUT_OF_RANGE naming the
// feature, the position of the first offending value, the value and what is allowed.
absl::Status ValidateFeature(absl::string_view feature, int64_t vocabulary_size,
                             const FeatureInput& input);

// Ids or samples, whichever is more, as the input says before it has been checked.
int64_t RoughSize(const FeatureInput& input);

// Samples of an input that ValidateFeature accepts.
int64_t SampleCount(const FeatureInput& input);

// Whether no sample of such an input has more than one id, or a weight other than 1. Its gains are
// 1 then, whatever the combiner.
bool HasSingleIds(const FeatureInput& input);

}  // namespace emberd::preprocess
