// A batch row by row: what the backward pass walks, and the distinct rows that a gather may return.
//
// A step is made of one or more parts: the batches of the ranks of a synchronous group, which
// together are one global batch. Its canonical sample order is (feature of the stack, rank, sample
// of the rank), as if the ranks' samples had been concatenated feature by feature.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "base/buffers.h"
#include "base/thread_pools.h"
#include "shard/batch/batch.h"
#include "shard/kernel_types.h"

namespace emberd::shard {

// Touches of the shard's k-th partition by (row, canonical sample), and kTouchPadding more. `parts`
// are of one stack, in rank order, and have the same number of features. Features whose tables
// follow one another are sorted one by one, by radix, over the bits that the table's rows have.
PooledArray<Touch> OrderByRow(absl::Span<const StackEntries* const> parts, int k,
                              int64_t rows_per_partition, BufferPool& pool);

// The same touches of all partitions of a batch that is the only part, from its runs: those of a
// partition are merged, slot by slot, which is cheaper than sorting. `canonical[slot]`: of each
// sample id of the slot its canonical sample; `place`: of each canonical sample that has entries,
// its index in StackEntries.samples. Empty if there are several mini-batches, or a run is not in
// order of (row, canonical sample), as it comes from preprocessing. A partition without entries has
// no padding either.
std::vector<PooledArray<Touch>> MergeTouches(const RunTable& runs,
                                             absl::Span<const absl::Span<const int32_t>> canonical,
                                             absl::Span<const uint32_t> place, BufferPool& pool,
                                             CpuPool& cpu);

// --- The distinct rows of one stack of a batch on one shard: what a gather returns as unique rows.
// The shard and the coordinator find them each for itself, from the same batch, and so agree on
// their order.

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
                              int64_t rows_per_partition, BufferPool& pool, CpuPool& cpu);

// A number of rows that DistinctRows cannot fall below if `runs` are a slot's mini-batches as
// preprocessing makes them, which share no row: the groups of the fullest slot of each partition.
int64_t LeastDistinctRows(const RunTable& runs, absl::Span<const int64_t> groups);

}  // namespace emberd::shard
