// Between the structs of model.h and the config and plan messages.
#pragma once

#include "absl/status/statusor.h"
#include "client/cpp/model.h"
#include "client/cpp/status.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/model.pb.h"
#include "emberd/v1/plan.pb.h"

namespace emberd::client {

// The config of a description, unchecked but for what has no place in a ModelConfig:
// INVALID_ARGUMENT names an unknown optimizer or optimizer parameter.
absl::StatusOr<v1::ModelConfig> EncodeModel(const ModelDescription& description);

// INTERNAL if config and plan do not belong together.
absl::StatusOr<Model> DecodeModel(uint64_t id, bool created, const v1::ModelConfig& config,
                                  const v1::ModelPlan& plan);

ClusterStatus DecodeStatus(const v1::GetStatusResponse& response);

}  // namespace emberd::client
