// One feature of a request as preprocessing sees it: spans over the caller's memory, any id width,
// any form.
#pragma once

#include <cstdint>
#include <variant>

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

}  // namespace emberd::preprocess
