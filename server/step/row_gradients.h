// The gradients of an update as sums of rows. Where a batch names rows more than once, their sums
// are fewer bytes than the gradients of all samples, and whoever has the gradients at hand can sum
// them while it copies them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "base/shared_arena.h"
#include "server/step/gradients.h"

namespace emberd::step {

// Memory for so many bytes that the shard reads where they are; null: any other will do.
using TakeBlock = std::function<std::shared_ptr<SharedBlock>(int64_t bytes)>;

// What one shard is sent, as GradientsForShard has it, but with sums of rows for the stacks where
// that is clearly less. The update must have no other rank: floats are summed in one order, which
// goes over the ranks. The shard gets the bits that it would have summed itself. Nothing if no
// stack is summed, if a sum is not finite, or if a block would hold other gradients, too.
std::optional<ShardGradients> SumsForShard(const GradientInput& input, const KeptBatch& batch,
                                           int shard, const TakeBlock& take_block = nullptr);

}  // namespace emberd::step
