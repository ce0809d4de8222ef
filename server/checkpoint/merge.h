// Making an incremental checkpoint whole.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "server/checkpoint/store.h"
#include "server/checkpoint/verify.h"

namespace emberd::server {

// Writes the rows of a checkpoint and of all that it builds on into new files, and replaces its own
// by them: at every moment it is one or the other. What builds on it still does. A checkpoint that
// is whole stays as it is. Takes a bounded amount of memory. ABORTED: it was deleted or merged
// meanwhile.
absl::StatusOr<v1::CheckpointInfo> MergeCheckpoint(const CheckpointStore& store,
                                                   const std::string& model,
                                                   const std::string& name,
                                                   TransferProgress progress);

}  // namespace emberd::server
