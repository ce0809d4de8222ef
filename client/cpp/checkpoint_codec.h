// Messages of the CheckpointService to plain data. Internal to the client.
#pragma once

#include "client/cpp/checkpoints.h"
#include "emberd/v1/checkpoint_service.pb.h"

namespace emberd::client {

CheckpointInfo DecodeCheckpoint(const v1::CheckpointInfo& message);
CheckpointList DecodeCheckpoints(const v1::ListCheckpointsResponse& message);
CheckpointProgress DecodeProgress(const v1::CheckpointProgress& message);

}  // namespace emberd::client
