// The gradients of an update: how they are read, and what each shard is sent of them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/regions.h"
#include "base/thread_pools.h"
#include "emberd/v1/embedding_service.pb.h"
#include "emberd/v1/types.pb.h"
#include "server/step/served_model.h"
#include "shard/update/update.h"

namespace emberd::step {

// One feature's gradient: [samples, dim] in the request's memory, at any alignment; not given:
// zero.
struct FeatureGradientView {
  const char* data = nullptr;
  v1::DataType dtype = v1::FLOAT32;
  bool shared = false;  // in one of GradientInput.regions

  bool given() const { return data != nullptr; }
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

// Checks everything that an update may have wrong: names, types, shapes, finite values,
// hyper-parameters, and the step where an optimizer needs it. Errors are INVALID_ARGUMENT and name
// the feature or table, the value and the rule; of several, what stands first in the request.
// Gradients that lie in memory shared with the client (of `regions`) may change after this: the
// shards check the values that are copied to them, and take those that they read in place as they
// are. The result refers to the memory of `request`. `regions` and `cpu` may be null.
absl::StatusOr<GradientInput> ReadGradients(const v1::ApplyGradientsRequest& request,
                                            const KeptBatch& batch,
                                            const RegionServer* regions = nullptr,
                                            CpuPool* cpu = nullptr);

// The gradients of an update for one shard, and what of ApplyCommand holds them.
struct ShardGradients {
  shard::ApplyInput input;
  std::shared_ptr<SharedBlock> block;
  bool in_place = false;  // the shard reads some where the client has put them
};

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

// Memory for so many bytes that the shard reads where they are; null: any other will do.
using TakeBlock = std::function<std::shared_ptr<SharedBlock>(int64_t bytes)>;

// What one shard is sent, as GradientsForShard has it, but with sums of rows for the stacks where
// that is clearly less: where a batch names rows more than once, whoever has the gradients at hand
// can sum them while it copies them. The update must have no other rank: floats are summed in one
// order, which goes over the ranks. The shard gets the bits that it would have summed itself.
// Nothing if no stack is summed, if a sum is not finite, or if a block would hold other gradients,
// too.
std::optional<ShardGradients> SumsForShard(const GradientInput& input, const KeptBatch& batch,
                                           int shard, const TakeBlock& take_block = nullptr);

}  // namespace emberd::step
