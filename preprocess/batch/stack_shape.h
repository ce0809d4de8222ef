// One stack as the core of preprocessing sees it: no names, no config.
#pragma once

#include <cstdint>
#include <vector>

#include "emberd/v1/model.pb.h"
#include "preprocess/batch/feature_input.h"
#include "preprocess/plan/rounding.h"

namespace emberd::preprocess {

struct FeatureShape {
  int64_t row_offset = 0;  // of its table, in local rows
  int64_t rotation = 0;    // in [0, P)
  v1::Combiner combiner = v1::SUM;
};

struct StackShape {
  int64_t partitions = 1;          // P, a power of two
  int64_t rows_per_partition = 1;  // every local row is below
  std::vector<FeatureShape> features;
  // Gain of a sample whose weights (or squares of weights) sum to zero: 0, or what the division
  // gives, as in JAX.
  bool divide_by_zero = false;

  int row_bits() const { return BitsFor(rows_per_partition); }
  int partition_bits() const { return BitsFor(partitions); }
};

// The inputs of the stack's features, in the order of StackShape.features. Checked by validate.h.
using StackInputs = absl::Span<const FeatureInput* const>;

}  // namespace emberd::preprocess
