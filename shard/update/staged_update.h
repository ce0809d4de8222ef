// An update that was checked and waits for its decision: everything that could be wrong with it is
// settled here, once, and what is kept is all that the update needs.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shard/batch/batch.h"
#include "shard/memory/memory_manager.h"
#include "shard/optimizers/rules.h"
#include "shard/types.h"

namespace emberd::shard {

class Model;

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
  int first_rank_ = -1;  // to come; -1: nobody has
  std::map<int, Agreed> stacks_;
};

}  // namespace emberd::shard
