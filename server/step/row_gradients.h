// The gradients of an update as sums of rows. Where a batch names rows more than once, their sums
// are fewer bytes than the gradients of all samples, and whoever has the gradients at hand can sum
// them while it copies them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/shared_arena.h"
#include "server/step/gradients.h"
#include "shard/batch/batch.h"
#include "shard/types.h"

namespace emberd::step {

// What one shard is sent, as GradientsForShard has it, but with sums of rows for the stacks where
// that is clearly less. The update must have no other rank: floats are summed in one order, which
// goes over the ranks. The shard gets the bits that it would have summed itself.
//
// Not thread-safe.
class RowSums {
 public:
  // Memory for so many bytes that the shard reads where they are; null: any other will do.
  using TakeBlock = std::function<std::shared_ptr<SharedBlock>(int64_t bytes)>;

  // `batch` must outlive it.
  RowSums(const KeptBatch& batch, int shard, TakeBlock take_block = nullptr);
  ~RowSums();

  // Sums what has come of the gradients, as far as their order allows, unless other stacks may be
  // sent beside the sums: then it is left to Finish, by when all have come.
  // `input` has what it had before, and more.
  void Advance(const GradientInput& input);
  // All have come. Nothing if no stack is summed, or if a sum is not finite.
  std::optional<ShardGradients> Finish(const GradientInput& input);

 private:
  struct Stack;
  bool AllAreSummed() const;
  // Without stacks that have no gradient, if those to come are known.
  void Begin(const GradientInput* all);
  void SumFeature(const GradientInput& input, Stack* stack, size_t feature);
  // All gradients have come; rows without one get 0.
  void CompleteSums(const GradientInput& input, Stack* stack);

  const KeptBatch& batch_;
  const int shard_;
  const TakeBlock take_block_;
  std::vector<Stack> stacks_;  // that are summed, in plan order
  bool begun_ = false;
  bool finite_ = true;  // all sums so far
  std::shared_ptr<SharedBlock> block_;
  std::shared_ptr<float> memory_;
};

}  // namespace emberd::step
