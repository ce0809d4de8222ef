// The entries of one partition, row by row: what the backward pass walks.
//
// A step is made of one or more parts: the batches of the ranks of a synchronous group, which
// together are one global batch. Its canonical sample order is (feature of the stack, rank, sample
// of the rank), as if the ranks' samples had been concatenated feature by feature.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "base/buffer_pool.h"
#include "shard/batch/batch.h"
#include "shard/kernel_types.h"

namespace emberd::shard {

// Touches of the shard's k-th partition by (row, canonical sample), and kTouchPadding more. `parts`
// are of one stack, in rank order, and have the same number of features. LSD radix sort over the
// bits that local rows have.
PooledArray<Touch> OrderByRow(absl::Span<const StackEntries* const> parts, int k,
                              int64_t rows_per_partition, BufferPool& pool);

}  // namespace emberd::shard
