// The checks and defaults of an optimizer that involve more than one field.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "emberd/v1/model.pb.h"

namespace emberd::config {

// Ordered clip bounds, and no option that the optimizer would ignore. `path` is that of
// `optimizer`, "" for none.
absl::Status CheckOptimizer(const v1::OptimizerConfig& optimizer, const std::string& path);

// Chooses the kind where none is set and writes every default.
void CompleteOptimizer(v1::OptimizerConfig* optimizer);

}  // namespace emberd::config
