// From a LookupRequest to the input of preprocessing: names, tensor types and shapes are checked
// here, values (ids, order, weights) by the preprocessor.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "emberd/v1/embedding_service.pb.h"
#include "preprocess/batch/feature_input.h"
#include "server/coordinator/served_model.h"

namespace emberd::server {

// Refers to the request's memory.
struct LookupInput {
  std::vector<preprocess::FeatureInput> features;  // by index in the config
  std::vector<int> order;                          // features as the request lists them
  v1::DataType activation_dtype = v1::FLOAT32;
};

// INVALID_ARGUMENT names the field of the feature. RESOURCE_EXHAUSTED if the activations would have
// more than `max_activation_bytes`.
absl::StatusOr<LookupInput> DecodeLookup(const v1::LookupRequest& request, const ServedModel& model,
                                         int64_t max_activation_bytes);

}  // namespace emberd::server
