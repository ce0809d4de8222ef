// The gradients of an update as sums of rows. Where a batch names rows more than once, their sums
// are fewer bytes than the gradients of all samples, and whoever has the gradients at hand can sum
// them while it copies them.
#pragma once

#include <memory>
#include <optional>

#include "server/coordinator/gradients.h"
#include "server/coordinator/kept_batch.h"
#include "shard/types.h"

namespace emberd::server {

// What shard `shard` is sent, as GradientsForShard has it, but with sums of rows for the stacks
// where that is clearly less. The update must have no other rank: floats are summed in one order,
// which goes over the ranks. The shard gets the bits that it would have summed itself. Nothing if
// no stack is such, or if a sum is not finite: then the shard is to find that out, as it does
// without sums.
// `block`: as for GradientsForShard.
std::optional<shard::ApplyInput> RowSumsForShard(
    const GradientInput& input, const KeptBatch& batch, int shard,
    const std::shared_ptr<SharedBlock>& block = nullptr);

}  // namespace emberd::server
