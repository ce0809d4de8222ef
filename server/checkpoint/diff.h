// What differs between two checkpoints.
#pragma once

#include "absl/status/statusor.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "server/checkpoint/partition_chain.h"
#include "server/checkpoint/verify.h"

namespace emberd::server {

// Every table that both have in the same size and width, and each of its slots that both have; also
// where their numbers of partitions differ. The progress is that of rows as floats. Takes a bounded
// amount of memory.
absl::StatusOr<v1::DiffCheckpointsResponse> DiffCheckpoints(const CheckpointChain& before,
                                                            const CheckpointChain& after,
                                                            TransferProgress progress);

}  // namespace emberd::server
