// An update on its way into the tables: the parts of a step, laid out stack by stack for the
// backward pass.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "base/buffers.h"
#include "shard/batch/batch.h"
#include "shard/store/model.h"
#include "shard/types.h"
#include "shard/update/staged_update.h"

namespace emberd::shard {

// What a step does to one stack.
struct StackUpdate {
  int stack = 0;
  StackStore* store = nullptr;
  StepRule rule;
  std::vector<const StackEntries*> parts;  // those with entries, in rank order; there may be none
  bool rows_touched = true;                // as in StackEntries, of all parts
  uint64_t rounding_key = 0;               // of the step
  // Where the gradients are, as UpdateArgs has it: an array if there is one part that has one, else
  // a pointer per sample. Null: all zero.
  const float* gradients = nullptr;
  PooledArray<const float*> gradient_rows;
  std::vector<float> zero_row;  // what the samples of a part without gradients point to

  int64_t partition_entries(int k) const;
};

// Immutable once it has its place, apart from the counters; shared by the jobs of its (stack,
// partition) pairs.
class UpdateWork {
 public:
  // `update` is complete; `model` is that of its batches.
  UpdateWork(std::shared_ptr<Model> model, StagedUpdate update, BufferPool& pool);

  // Those of the batches.
  const std::vector<StackUpdate>& stacks() const { return stacks_; }
  // Gives the step its place among the updates of its stacks. To be called once, before any
  // partition is updated, and in the order in which updates take their strands.
  void TakePlace();
  // Updates the rows of the k-th partition; the caller holds its strand.
  // Rows updated.
  int64_t UpdatePartition(const StackUpdate& stack, int k, BufferPool& pool);
  // Of the partitions updated so far.
  ApplyResult Result() const;

  std::function<void(absl::StatusOr<ApplyResult>)> done;
  std::atomic<int> jobs_left{0};

 private:
  struct Counts {
    std::atomic<int64_t> updated{0};
    std::atomic<int64_t> skipped{0};
  };

  void AddStack(int index, const StepRule& rule, BufferPool& pool);

  const std::shared_ptr<Model> model_;
  const StagedUpdate update_;
  std::vector<StackUpdate> stacks_;
  std::vector<Counts> counts_;  // of stacks_
};

}  // namespace emberd::shard
