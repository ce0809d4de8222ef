// Unique rows, as a shard may return them instead of partial sums.
#pragma once

#include "absl/status/status.h"
#include "preprocess/batch/preprocessor.h"
#include "server/coordinator/served_model.h"
#include "server/shard/shard_backend.h"
#include "shard/gather/pooling.h"

namespace emberd::server {

// Makes of the unique rows in the answer of shard `shard` the partial sums that it would have sent
// otherwise, bit for bit; `result->stacks` then has all stacks, in plan order. `result` has passed
// CheckGatherResult. INTERNAL if the rows are not as many as the batch has here.
absl::Status PoolUniqueRows(const ServedModel& model, const preprocess::PreprocessedBatch& batch,
                            int shard, shard::RowPooler* pooler, GatherResult* result);

}  // namespace emberd::server
