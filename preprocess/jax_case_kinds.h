// The two large kinds of jax_case.h. Both may throw nlohmann's exceptions.
#pragma once

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "preprocess/jax_case.h"

namespace emberd::preprocess {

absl::StatusOr<nlohmann::json> JaxStackingCase(const nlohmann::json& input);
absl::StatusOr<nlohmann::json> JaxPreprocessCase(const nlohmann::json& input,
                                                 const JaxCaseOptions& options);

}  // namespace emberd::preprocess
