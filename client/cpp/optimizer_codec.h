// From an Optimizer to the OptimizerConfig message, by the field names of the message.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "client/cpp/model.h"
#include "emberd/v1/model.pb.h"

namespace emberd::client {

// INVALID_ARGUMENT, beginning with `path`, for an optimizer or a parameter that the message does
// not have, for a finite value that is too large for its float field, and for a flag that is
// neither 0 nor 1. Other ranges are checked by config::CompleteModel.
absl::Status EncodeOptimizer(const Optimizer& optimizer, const std::string& path,
                             v1::OptimizerConfig* config);

}  // namespace emberd::client
