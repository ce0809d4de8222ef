// How the followed systems number ids and rows where emberd does not need it: for tests
// against their results.
#pragma once

#include <cstdint>

#include "preprocess/batch/highway_buckets.h"
#include "preprocess/plan/plan.h"

namespace emberd::preprocess {

// HighwayHash-64, with JAX's key, of the 4 little-endian bytes of a stacked id.
inline uint64_t HashStackedId(int32_t stacked_id) {
  alignas(32) const highwayhash::HHKey key = {kHighwayKey[0], kHighwayKey[1], kHighwayKey[2],
                                              kHighwayKey[3]};
  highwayhash::HHStateT<HH_TARGET_Portable> state(key);
  highwayhash::HHResult64 hash;
  highwayhash::HighwayHashT(&state, reinterpret_cast<const char*>(&stacked_id), sizeof(stacked_id),
                            &hash);
  return hash;
}

// The id of a table in the numbering of the whole stack, which bucket hashes and limits work on.
inline int64_t StackedId(const RowPlacement& table, int64_t id) {
  return table.LocalRow(id) * table.partitions + table.Partition(id);
}
// The inverse of RowPlacement::Partition and LocalRow.
inline int64_t TableRow(const RowPlacement& table, int64_t partition, int64_t local_row) {
  return (local_row - table.row_offset) * table.partitions +
         (partition - table.rotation + table.partitions) % table.partitions;
}
// Row in the array in which the partitions follow one another, `stack_rows` rows each.
inline int64_t PhysicalRow(const RowPlacement& table, int64_t id, int64_t stack_rows) {
  return table.Partition(id) * stack_rows + table.LocalRow(id);
}

}  // namespace emberd::preprocess
