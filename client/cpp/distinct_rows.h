// Rows that the answer to a lookup has once each, with the row of each sample: what activations are
// made of, and for which gradients are summed before they are sent. Internal to the client.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/cpp/batch.h"
#include "client/cpp/options.h"

namespace emberd::client {

// Of one feature.
struct IndexedRows {
  int64_t rows = 0;
  std::vector<int32_t> index = {};  // [samples]: the row of each; -1: none
};
// By feature: those for which sums of gradients may be sent.
using StepRows = absl::flat_hash_map<std::string, IndexedRows>;

// INTERNAL if an index is none of the rows, and not -1.
absl::Status CheckIndex(const IndexedRows& rows);

// Writes the activation of each sample: +0 + its row, of bfloat16 just the row, or zeros. `values`:
// where each row lies, `dim` elements of the type or more, at any alignment. `to`: [samples, dim],
// `stride` floats from one row to the next.
void SpreadRows(const IndexedRows& rows, absl::Span<const char* const> values, WireType type,
                int64_t dim, int64_t stride, float* to);

// Writes sums, [rows, dim]: of each row, from +0 on, the gradients of the samples that have it, in
// their order. False if one is not finite, or the gradient of a sample that has no row.
bool SumByRow(const IndexedRows& rows, const FeatureGradient& gradient, int64_t dim, float* sums);
// The rows that several samples have, ascending. The sum of one bfloat16 gradient has no lower
// half.
std::vector<int32_t> FindRepeated(const IndexedRows& rows);
// As SumByRow, of gradients rounded to bfloat16. Writes the upper halves of the sums, [rows, dim],
// and after them the lower halves of those of `repeated`, [repeated, dim], which FindRepeated has
// found. `scratch`: [repeated, dim].
bool SumRoundedByRow(const IndexedRows& rows, absl::Span<const int32_t> repeated,
                     const FeatureGradient& gradient, int64_t dim, float* scratch,
                     uint16_t* halves);

}  // namespace emberd::client
