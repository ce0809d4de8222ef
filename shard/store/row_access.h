// Reading and writing rows by (partition, local row): checks, and the copy itself.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shard/store/model.h"
#include "shard/types.h"

namespace emberd::shard {

// A selection resolved against its stack.
struct RowTarget {
  StackStore* store = nullptr;
  const StackStore::Slot* slot = nullptr;  // null: weights
  std::vector<int64_t> rows;               // as StackStore numbers them
  std::vector<Strand*> strands;            // of the partitions named
  int columns = 0;
};

// INVALID_ARGUMENT or OUT_OF_RANGE names what does not fit. `value_count` is what the caller's
// buffer holds; for writing, padding columns are refused.
absl::StatusOr<RowTarget> ResolveRows(const Model& model, const RowSelection& selection,
                                      size_t value_count, bool writing);

// Rows [begin, end) of the target; the caller holds its strands.
void CopyRowsOut(const RowTarget& target, int64_t begin, int64_t end, float* values);
void CopyRowsIn(const RowTarget& target, int64_t begin, int64_t end, const float* values);

}  // namespace emberd::shard
