// An update on a shard, from the parts that its ranks bring until its rows are written. First it is
// checked, and waits for its decision: everything that could be wrong with it is found here, once,
// and what is kept is all that the update needs. Then the Engine takes it into the tables: the
// parts of the step, laid out stack by stack for the backward pass.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "shard/batch/batch.h"
#include "shard/memory/memory_manager.h"
#include "shard/optimizers/rules.h"

namespace emberd::shard {

class Model;
class StackStore;

// Overrides of one step by OptimizerConfig field name, e.g. "learning_rate".
using Hyperparameters = absl::flat_hash_map<std::string, double>;

// Gradients of one stack: one row for each sample that has an entry here, ascending (those that
// StackSums names).
struct StackGradients {
  int stack = 0;
  // [samples, width]; empty: every gradient is zero (rows are updated all the same). Padding
  // columns are zero.
  absl::Span<const float> gradients;
  Hyperparameters hyperparameters;
  // Instead of `gradients`: where they lie, for all features of the stack, in canonical order.
  // Whoever gives them has checked that they are finite; a value that has changed since and is no
  // longer finite counts as 0.
  std::vector<FeatureRows<const float>> features = {};
  // `gradients` has a row for each distinct row instead, in the order of StackRows: the sum that an
  // update makes of its samples' gradients. Only for a batch that returned these rows, and for the
  // only rank of its step. Whoever gives them has checked the gradients. A sum of finite gradients
  // may be infinite; it counts as it would if the update had made it.
  bool of_rows = false;
};

struct ApplyInput {
  std::vector<StackGradients>
      stacks;             // at most one per stack of the batch; a missing one counts as all zero
  int64_t step = -1;      // 0-based; -1: not given
  uint64_t rng_seed = 0;  // StackStore::NextRoundingKey
  bool skip = false;      // no row changes; there are no gradients
  // The gradients come from a log, and were checked before they were written there. Some may be
  // sums (StackGradients.of_rows), which need not be finite.
  bool checked = false;
  std::shared_ptr<const void> owner;  // keeps the gradients alive until done
};

struct ApplyResult {
  int64_t rows_updated = 0;  // distinct rows of all stacks
  int64_t rows_skipped = 0;  // left as they were: StackSpec::skip_nonfinite
  // The same of each stack that the batches have.
  struct Stack {
    int stack = 0;
    int64_t rows_updated = 0;
    int64_t rows_skipped = 0;
  };
  std::vector<Stack> stacks;
};

// What one rank brings to a step, checked against its batch. Immutable, thread-safe.
class CheckedPart {
 public:
  // One stack of the batch.
  struct Stack {
    const StackEntries* entries = nullptr;
    // [samples of entries, width]; null: all zero, unless `features` has them.
    const float* gradients = nullptr;
    // Where they lie instead; empty: they do not.
    std::vector<FeatureRows<const float>> features;
    int64_t gradient_bytes = 0;
    StepRule rule;
    // A rank that gives no gradients of a stack has no say in its hyper-parameters.
    bool has_say = false;
    Hyperparameters hyperparameters;
  };

  // INVALID_ARGUMENT for stacks given twice or unknown to the batch, gradients of the wrong number
  // or not finite (unless the stack skips such rows, or they are sums of rows), sums of rows that
  // the batch did not return, hyper-parameters of a wrong name or value, a step that the optimizer
  // needs and is not given, gradients of a step that is skipped. NOT_FOUND: the model was dropped.
  // RESOURCE_EXHAUSTED, DATA_LOSS: Model::Hold; the part holds the rows.
  static absl::StatusOr<std::shared_ptr<const CheckedPart>> Make(std::shared_ptr<const Batch> batch,
                                                                 ApplyInput input);

  const Batch& batch() const { return *batch_; }
  int64_t step() const { return step_; }
  uint64_t rng_seed() const { return rng_seed_; }
  bool skip() const { return skip_; }
  const std::vector<Stack>& stacks() const { return stacks_; }  // in the order of the batch
  const Stack* Find(int stack) const;                           // null: not in the batch
  int64_t gradient_bytes() const;                               // of all stacks
  // Some gradients are sums of rows: their part makes a step of its own.
  bool stands_alone() const { return !row_entries_.empty(); }

 private:
  CheckedPart() = default;

  std::shared_ptr<const Batch> batch_;
  MemoryManager::Use use_;  // the update needs the rows, and can no longer be refused for them
  std::shared_ptr<const void> owner_;
  int64_t step_ = -1;
  uint64_t rng_seed_ = 0;
  bool skip_ = false;
  std::vector<Stack> stacks_;
  std::deque<StackEntries> row_entries_;  // of stacks whose gradients are sums of rows
};

// A step on its way: the parts of its ranks, which agree. Parts may be added in any order; when all
// are there, nothing can be wrong with the update, unless its model is dropped. Not thread-safe.
class StagedUpdate {
 public:
  StagedUpdate() = default;  // of no rank
  explicit StagedUpdate(int ranks) : parts_(ranks) {}
  // Of one rank.
  explicit StagedUpdate(std::shared_ptr<const CheckedPart> part);

  // INVALID_ARGUMENT if the part has another model, step, seed, number of features or
  // hyper-parameter than those that are here, or not all skip the step: names rank, stack, field
  // and both values. INVALID_ARGUMENT if the part stands alone and the step has several ranks.
  // INVALID_ARGUMENT for too many entries. NOT_FOUND: the model was dropped. A part that is refused
  // leaves no trace. The rank must be missing.
  absl::Status Add(int rank, std::shared_ptr<const CheckedPart> part);

  int ranks() const { return static_cast<int>(parts_.size()); }
  bool Has(int rank) const { return parts_[rank] != nullptr; }
  int held() const { return held_; }
  bool complete() const { return held_ > 0 && held_ == ranks(); }
  int64_t gradient_bytes() const;  // of all parts that are here
  // The ranks that are here skip the step.
  bool skip() const { return held_ > 0 && parts_[first_rank_]->skip(); }
  // That of the parts; there must be one. NOT_FOUND: it was dropped.
  absl::StatusOr<std::shared_ptr<Model>> model() const {
    return parts_[first_rank_]->batch().model();
  }

  // By rank; null: missing.
  absl::Span<const std::shared_ptr<const CheckedPart>> parts() const { return parts_; }
  // A stack that some part has, and what all parts agree on.
  struct Agreed {
    struct Voice {  // the first part that said it
      int rank = -1;
      const CheckedPart::Stack* stack = nullptr;  // null: nobody yet
    };
    Voice features;
    Voice hyperparameters;
    int64_t entries = 0;  // of all parts
    const StepRule& rule() const {
      return hyperparameters.stack != nullptr ? hyperparameters.stack->rule : features.stack->rule;
    }
  };
  const std::map<int, Agreed>& stacks() const { return stacks_; }

 private:
  absl::Status CheckStep(int rank, const CheckedPart& part, const Model& model) const;
  absl::Status CheckStack(int rank, const CheckedPart::Stack& stack, const std::string& name) const;
  void Place(int rank, std::shared_ptr<const CheckedPart> part);

  std::vector<std::shared_ptr<const CheckedPart>> parts_;
  int held_ = 0;
  int first_rank_ = -1;  // whose part came first; -1: none has
  std::map<int, Agreed> stacks_;
};

// --- On its way into the tables.

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
  // Updates the rows of the k-th partition, and returns how many; the caller holds its strand.
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
