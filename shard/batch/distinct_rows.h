// The distinct rows of one stack of a batch on one shard: what a gather returns as unique rows. The
// shard and the coordinator find them each for itself, from the same batch, and so agree on their
// order.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "base/buffer_pool.h"
#include "shard/batch/run_table.h"
#include "shard/executor.h"

namespace emberd::shard {

// A group: neighbouring entries of a run that name the same row. In a run as preprocessing makes it
// each row is one group; from the wire anything may come.
int64_t CountGroups(const Run& run);

struct DistinctRows {
  // k * rows_per_partition + local row, ascending.
  PooledArray<uint32_t> rows;
  // Rows of partition k end here: [partitions].
  std::vector<uint64_t> partition_ends;
  // For run i, where its groups begin in `ranks`, which says where in `rows` each group's row
  // stands: [runs]. By RunTable::index.
  std::vector<int64_t> first_group;
  PooledArray<uint32_t> ranks;
};

// `groups`: CountGroups of each run. Local rows have been checked against `rows_per_partition`.
DistinctRows FindDistinctRows(const RunTable& runs, absl::Span<const int64_t> groups,
                              int64_t rows_per_partition, BufferPool& pool, Executor& executor);

// A number of rows that DistinctRows cannot fall below if `runs` are a slot's mini-batches as
// preprocessing makes them, which share no row: the groups of the fullest slot of each partition.
int64_t LeastDistinctRows(const RunTable& runs, absl::Span<const int64_t> groups);

}  // namespace emberd::shard
