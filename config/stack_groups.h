// Groups of tables that the user wants stacked together (PlanConfig.groups).
#pragma once

#include "absl/status/status.h"
#include "emberd/v1/model.pb.h"

namespace emberd::config {

// Checks the groups of a model whose tables are checked and complete, and names those without a
// name. `model` may be half named on failure.
absl::Status CompleteGroups(v1::ModelConfig* model);

}  // namespace emberd::config
