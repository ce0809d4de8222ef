// The gradients of an update, and what each shard is sent of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "base/region_server.h"
#include "base/shared_arena.h"
#include "emberd/v1/types.pb.h"
#include "server/coordinator/kept_batch.h"
#include "server/coordinator/row_runs.h"
#include "server/shard/shard_backend.h"
#include "shard/types.h"

namespace emberd::server {

class RowSums;

// One feature's gradient: [samples, dim] in the request's memory; not given: zero.
struct FeatureGradientView {
  RowRuns rows;
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
  // By shard: sums of rows that were begun while gradients came. Empty: none were.
  std::vector<std::shared_ptr<RowSums>> sums;
};

// The gradients of an update for one shard, and what of ApplyCommand holds them.
struct ShardGradients {
  shard::ApplyInput input;
  std::shared_ptr<SharedBlock> block;
  bool in_place = false;  // the shard reads some where the client has put them
};

// Whether any feature of a stack has a gradient.
bool AnyGiven(const GradientInput& input, const preprocess::StackPlan& stack);

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
