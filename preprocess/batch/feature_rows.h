// Walks the samples of a feature, whatever form and width it came in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <variant>

#include "preprocess/batch/feature_input.h"

namespace emberd::preprocess {

// Samples of an input that validate.h has accepted.
inline int64_t SampleCount(const FeatureInput& input) {
  if (const auto* dense = std::get_if<DenseInput>(&input.ids)) return dense->sample_count;
  if (const auto* sparse = std::get_if<SparseInput>(&input.ids)) return sparse->sample_count;
  const IntSpan& splits = std::get<RaggedInput>(input.ids).row_splits;
  return std::visit([](const auto& s) { return static_cast<int64_t>(s.size()) - 1; }, splits);
}

// First index pair of a sparse input whose sample is >= `sample`.
template <typename Index>
int64_t FirstPairOf(absl::Span<const Index> indices, int64_t sample) {
  int64_t low = 0;
  int64_t high = static_cast<int64_t>(indices.size()) / 2;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (static_cast<int64_t>(indices[2 * middle]) < sample) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Calls visit(offset, ids, n, position) for samples begin + offset, offset = 0 to count - 1: `ids`
// points to the n ids of the sample, the first of which stands at `position` among all ids of the
// feature (and so do its weights).
template <typename Visit>
void VisitSamples(const FeatureInput& input, int64_t begin, int64_t count, Visit&& visit) {
  struct Visitor {
    int64_t begin, count;
    Visit& visit;
    void operator()(const DenseInput& dense) const {
      const int64_t n = dense.ids_per_sample;
      std::visit(
          [&](const auto& ids) {
            for (int64_t j = 0; j < count; ++j) {
              const int64_t position = (begin + j) * n;
              visit(j, ids.data() + position, n, position);
            }
          },
          dense.ids);
    }
    void operator()(const RaggedInput& ragged) const {
      std::visit(
          [&](const auto& splits, const auto& values) {
            for (int64_t j = 0; j < count; ++j) {
              const int64_t position = splits[begin + j];
              visit(j, values.data() + position, splits[begin + j + 1] - position, position);
            }
          },
          ragged.row_splits, ragged.values);
    }
    void operator()(const SparseInput& sparse) const {
      std::visit(
          [&](const auto& indices, const auto& values) {
            const int64_t pairs = static_cast<int64_t>(indices.size()) / 2;
            int64_t position = FirstPairOf(indices, begin);
            for (int64_t j = 0; j < count; ++j) {
              int64_t end = position;
              while (end < pairs && static_cast<int64_t>(indices[2 * end]) == begin + j) ++end;
              visit(j, values.data() + position, end - position, position);
              position = end;
            }
          },
          sparse.indices, sparse.values);
    }
  };
  std::visit(Visitor{begin, count, visit}, input.ids);
}

}  // namespace emberd::preprocess
