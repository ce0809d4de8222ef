// From an ApplyGradientsRequest to the gradients of each shard.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "base/cpu_pool.h"
#include "base/region_server.h"
#include "base/shared_arena.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/coordinator/kept_batch.h"
#include "shard/types.h"

namespace emberd::server {

// One feature's gradient: [samples, dim] in the request's memory; null: zero.
struct FeatureGradientView {
  const char* data = nullptr;
  v1::DataType dtype = v1::FLOAT32;
  bool shared = false;  // in one of GradientInput.regions
};

// Refers to the request's memory.
struct GradientInput {
  std::vector<FeatureGradientView> features;  // by index in the config
  std::vector<NamedRegion> regions;           // of the client's that features refer to
  // By stack: overrides of this step.
  std::vector<absl::flat_hash_map<std::string, double>> hyperparameters;
  int64_t step = -1;
  uint64_t rng_seed = 0;
};

// Checks everything that a request may have wrong: names, types, shapes, finite values,
// hyper-parameters, and the step where an optimizer needs it. Errors are INVALID_ARGUMENT and name
// the feature or table, the value and the rule. Gradients that lie in memory shared with the client
// (of `regions`) may change after this: the shards check the values that are copied to them, and
// take those that they read in place as they are. `cpu`: may be null.
absl::StatusOr<GradientInput> DecodeGradients(const v1::ApplyGradientsRequest& request,
                                              const KeptBatch& batch,
                                              const RegionServer* regions = nullptr,
                                              CpuPool* cpu = nullptr);

// What shard `shard` is sent: for each stack, a row of the padded width for every sample that the
// shard returned from the lookup. A stack none of whose features has a gradient has no rows.
// They are written to `block`, which has GradientBytes bytes; null: into memory of their own.
// `in_place`: of stacks whose gradients lie in shared memory as the shards need them, the shard is
// told where.
shard::ApplyInput GradientsForShard(const GradientInput& input, const KeptBatch& batch, int shard,
                                    bool in_place,
                                    const std::shared_ptr<SharedBlock>& block = nullptr);
int64_t GradientBytes(const GradientInput& input, const KeptBatch& batch, int shard, bool in_place);
// Whether there are such stacks.
bool AnyInPlace(const GradientInput& input, const KeptBatch& batch);

}  // namespace emberd::server
