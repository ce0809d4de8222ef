// Between the structs of model.h and checkpoints.h, and the messages that say the same.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/checkpoints.h"
#include "client/cpp/model.h"
#include "client/cpp/status.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "emberd/v1/model.pb.h"
#include "emberd/v1/plan.pb.h"

namespace emberd::client {

// From an Optimizer to the OptimizerConfig message, by the field names of the message.

// INVALID_ARGUMENT, beginning with `path`, for an optimizer or a parameter that the message does
// not have, for a finite value that is too large for its float field, and for a flag that is
// neither 0 nor 1. Other ranges are checked by config::CompleteModel.
absl::Status EncodeOptimizer(const Optimizer& optimizer, const std::string& path,
                             v1::OptimizerConfig* config);

// The config of a description, unchecked but for what has no place in a ModelConfig:
// INVALID_ARGUMENT names an unknown optimizer or optimizer parameter.
absl::StatusOr<v1::ModelConfig> EncodeModel(const ModelDescription& description);

// INTERNAL if config and plan do not belong together.
absl::StatusOr<Model> DecodeModel(uint64_t id, bool created, const v1::ModelConfig& config,
                                  const v1::ModelPlan& plan);

ClusterStatus DecodeStatus(const v1::GetStatusResponse& response);

// Messages of the CheckpointService to plain data. Internal to the client.
CheckpointInfo DecodeCheckpoint(const v1::CheckpointInfo& message);
CheckpointList DecodeCheckpoints(const v1::ListCheckpointsResponse& message);
CheckpointProgress DecodeProgress(const v1::CheckpointProgress& message);

}  // namespace emberd::client
