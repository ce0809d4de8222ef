// What a combiner makes of the weights of a sample: the factor of each looked-up row.
#pragma once

#include <cmath>
#include <cstdint>

#include "emberd/v1/model.pb.h"

namespace emberd::preprocess {

// By what the weights of a sample are divided: the sum of the weights (MEAN) or the root of the sum
// of their squares (SQRTN), over all occurrences in order, in float32; 1 for SUM.
inline float WeightDivisor(v1::Combiner combiner, const float* weights, int64_t n) {
  if (combiner == v1::SUM) return 1.0f;
  float sum = 0.0f;
  if (combiner == v1::SQRTN) {
    for (int64_t i = 0; i < n; ++i) sum += weights[i] * weights[i];
    return std::sqrt(sum);
  }
  for (int64_t i = 0; i < n; ++i) sum += weights[i];
  return sum;
}

// The same for n weights that are all equal.
inline float WeightDivisor(v1::Combiner combiner, float weight, int64_t n) {
  if (combiner == v1::SUM) return 1.0f;
  if (weight == 1.0f) {  // exact for more than 2^24 ids too
    return combiner == v1::SQRTN ? std::sqrt(static_cast<float>(n)) : static_cast<float>(n);
  }
  const float term = combiner == v1::SQRTN ? weight * weight : weight;
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) sum += term;
  return combiner == v1::SQRTN ? std::sqrt(sum) : sum;
}

// The gain of one occurrence. A zero divisor gives 0, or the quotient if `divide_by_zero`.
inline float Gain(float weight, float divisor, bool divide_by_zero) {
  if (divisor == 0.0f && !divide_by_zero) return 0.0f;
  return weight / divisor;
}

}  // namespace emberd::preprocess
