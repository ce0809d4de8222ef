// From an ApplyGradientsRequest to the gradients of each shard.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/coordinator/kept_batch.h"
#include "shard/types.h"

namespace emberd::server {

// One feature's gradient: [samples, dim] in the request's memory; null: zero.
struct FeatureGradientView {
  const char* data = nullptr;
  v1::DataType dtype = v1::FLOAT32;
};

// Refers to the request's memory.
struct GradientInput {
  std::vector<FeatureGradientView> features;  // by index in the config
  // By stack: overrides of this step.
  std::vector<absl::flat_hash_map<std::string, double>> hyperparameters;
  int64_t step = -1;
};

// Checks everything that a request may have wrong: names, types, shapes, finite values,
// hyper-parameters, and the step where an optimizer needs it. Errors are INVALID_ARGUMENT and name
// the feature or table, the value and the rule.
absl::StatusOr<GradientInput> DecodeGradients(const v1::ApplyGradientsRequest& request,
                                              const KeptBatch& batch);

// What shard `shard` is sent: for each stack, a row of the padded width for every sample that the
// shard returned from the lookup. A stack none of whose features has a gradient has no rows.
shard::ApplyInput GradientsForShard(const GradientInput& input, const KeptBatch& batch, int shard);

}  // namespace emberd::server
