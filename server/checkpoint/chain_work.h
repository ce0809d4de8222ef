// What is done with whole checkpoints: reading every byte of one, making an incremental one whole,
// comparing two.
#pragma once

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "server/checkpoint/partition_file.h"
#include "server/checkpoint/store.h"

namespace emberd::checkpoint {

// Hears how many of all bytes are done; a status that is not OK ends the work with it.
using TransferProgress = absl::FunctionRef<absl::Status(int64_t bytes, int64_t total_bytes)>;

// DATA_LOSS that names each file that is missing, cut off, changed or another one, the first ten of
// them. Of files that cannot be read, the first error. `takes`: asked for each file in turn,
// whether it is to be read.
absl::Status VerifyChain(
    const CheckpointChain& chain, TransferProgress progress,
    absl::FunctionRef<bool()> takes = [] { return true; });

// Bytes of all files of a chain.
int64_t BytesOf(const CheckpointChain& chain);

// Writes the rows of a checkpoint and of all that it builds on into new files, and replaces its own
// by them: at every moment it is one or the other. What builds on it still does. A checkpoint that
// is whole stays as it is. Takes a bounded amount of memory. ABORTED: it was deleted or merged
// meanwhile.
absl::StatusOr<v1::CheckpointInfo> MergeCheckpoint(const CheckpointStore& store,
                                                   const std::string& model,
                                                   const std::string& name,
                                                   TransferProgress progress);

// Every table that both have in the same size and width, and each of its slots that both have; also
// where their numbers of partitions differ. The progress is that of rows as floats. Takes a bounded
// amount of memory.
absl::StatusOr<v1::DiffCheckpointsResponse> DiffCheckpoints(const CheckpointChain& before,
                                                            const CheckpointChain& after,
                                                            TransferProgress progress);

}  // namespace emberd::checkpoint
