// The engine once more, in plain loops over plain vectors: what the kernels must equal bit by bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

#include "shard/testing/test_batch.h"

namespace emberd::shard::testing {

using Row = std::vector<float>;
// A table by global partition and local row.
using TableRows = std::map<std::pair<int, int>, Row>;

// x -> floor((clamp(x) - lower) / q + 0.5) * q + lower
inline float Quantize(float x, float lower, float upper, int num_buckets) {
  const float q = (upper - lower) / static_cast<float>(num_buckets - 1);
  const float per_q = static_cast<float>(num_buckets - 1) / (upper - lower);
  const float bucket = (std::clamp(x, lower, upper) - lower) * per_q;
  return std::floor(bucket + 0.5f) * q + lower;
}

// Balanced tree over partitions [first, first + count) where an absent partition is left out.
inline bool FoldTree(const std::map<int, Row>& partials, int first, int count, Row& sum) {
  if (count == 1) {
    const auto it = partials.find(first);
    if (it == partials.end()) return false;
    sum = it->second;
    return true;
  }
  Row right;
  const bool has_left = FoldTree(partials, first, count / 2, sum);
  const bool has_right = FoldTree(partials, first + count / 2, count / 2, right);
  if (has_left && has_right) {
    for (size_t c = 0; c < sum.size(); ++c) sum[c] = sum[c] + right[c];
  } else if (has_right) {
    sum = right;
  }
  return has_left || has_right;
}

// Sums per sample over partitions [first, first + count); samples without an entry there are
// absent.
template <class RowOf>
std::map<int, Row> ReferenceGather(const std::vector<TestEntry>& entries, int first, int count,
                                   int width, const RowOf& row_of) {
  std::map<int, std::map<int, Row>> partials;
  for (const TestEntry& e : entries) {  // by (sample, partition, row)
    if (e.partition < first || e.partition >= first + count) continue;
    Row& sum = partials[e.sample].try_emplace(e.partition, Row(width, 0.0f)).first->second;
    const Row row = row_of(e.partition, e.row);
    for (int c = 0; c < width; ++c) sum[c] = sum[c] + e.gain * row[c];
  }
  std::map<int, Row> result;
  for (const auto& [sample, by_partition] : partials)
    FoldTree(by_partition, first, count, result[sample]);
  return result;
}

// Summed gradient of every touched row of partitions [first, first + count), in canonical sample
// order.
template <class GradientOf>
TableRows ReferenceGradients(const std::vector<TestEntry>& entries, int first, int count, int width,
                             const GradientOf& gradient_of) {
  TableRows result;
  for (const TestEntry& e : entries) {
    if (e.partition < first || e.partition >= first + count) continue;
    Row& sum = result.try_emplace({e.partition, e.row}, Row(width, 0.0f)).first->second;
    const Row gradient = gradient_of(e.sample);
    for (int c = 0; c < width; ++c) sum[c] = sum[c] + e.gain * gradient[c];
  }
  return result;
}

}  // namespace emberd::shard::testing
