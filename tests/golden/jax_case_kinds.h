// The two large kinds of jax_case.h. Both may throw nlohmann's exceptions.
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "emberd/v1/model.pb.h"
#include "tests/golden/jax_case.h"

namespace emberd::preprocess {

// Beyond what JAX runs on; keeps malformed cases from harm.
inline constexpr int64_t kMaxPartitions = 1 << 13;

inline v1::Combiner CombinerOf(const std::string& name) {
  if (name == "mean") return v1::MEAN;
  return name == "sqrtn" ? v1::SQRTN : v1::SUM;  // whatever else means sum, as in JAX
}

absl::StatusOr<nlohmann::json> JaxStackingCase(const nlohmann::json& input);
absl::StatusOr<nlohmann::json> JaxPreprocessCase(const nlohmann::json& input,
                                                 const JaxCaseOptions& options);

}  // namespace emberd::preprocess
