// Features of a batch in, CSR mini-batches per (stack, shard) out. No I/O, no gRPC, no globals.
//
//   validate   sort_and_merge.h  the arrays of each feature fit together, ids are in range
//   lay out    sort_and_merge.h  samples go to source slots
//   sort       sort_and_merge.h  each id becomes a key; equal (row, sample) pairs merge
//   find cuts  cuts.h            if a partition exceeds a limit: where the vocabulary is cut
//   finish     cuts.h            the batch is cut into mini-batches, fitted into its buffers and
//                                counted
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "base/thread_pools.h"
#include "emberd/v1/model.pb.h"
#include "emberd/v1/statistics.pb.h"
#include "preprocess/batch/csr.h"
#include "preprocess/batch/cuts.h"
#include "preprocess/batch/sort_and_merge.h"
#include "preprocess/plan/plan.h"

namespace emberd::preprocess {

// One stack of a batch.
struct StackBatch {
  std::vector<const FeatureInput*> inputs;  // valid during preparation only
  std::vector<int64_t> feature_samples;     // by position in the stack
  std::vector<SlotLayout> layout;           // [source slots]
  GainKind gain_kind = GainKind::kOne;
  int64_t samples = 0;
  int64_t ids_per_sample = 0;                  // cells that it needs, for each sample
  bool single_rows = false;                    // as in StackBatchView
  std::vector<SlotCsr> slots;                  // [source slots]
  std::vector<SlotBuckets> buckets;            // [source slots]; filled if the batch is cut
  std::vector<std::vector<SampleSpan>> spans;  // [source slots]
};

// A preprocessed batch. Whoever gets one from a Preprocessor gets it const: it is immutable, and
// its views stay valid as long as it lives. Its buffers return to the Preprocessor that made it, so
// it must not outlive that one.
class PreprocessedBatch {
 public:
  // What shard `shard` needs: one view per stack of the plan, in plan order.
  std::vector<StackBatchView> ShardView(int shard) const;
  // Samples of feature i of the config in this batch.
  absl::Span<const int64_t> feature_samples() const { return feature_samples_; }
  // First canonical sample of feature i of the config inside its stack, for this batch.
  absl::Span<const int64_t> feature_sample_begin() const { return feature_sample_begin_; }
  // Canonical samples of a stack: the sum over its features.
  int64_t stack_samples(int stack) const { return stacks_[stack].samples; }
  const v1::BatchStatistics& statistics() const { return statistics_; }
  // Of a stack, by source slot.
  absl::Span<const SlotCsr> slots(int stack) const { return stacks_[stack].slots; }
  // Where its mini-batches meet.
  CutSet cuts() const { return cuts_; }
  // Bytes of memory that the batch holds.
  int64_t bytes() const;

 private:
  friend class Preprocessor;

  // Takes the inputs' shapes: sample counts, canonical order, source slots and spans.
  void LayOut(const Plan& plan, v1::SampleLayout layout, absl::Span<const FeatureInput> inputs);

  const Plan* plan_ = nullptr;
  CutSet cuts_ = 0;
  std::vector<StackBatch> stacks_;
  std::vector<int64_t> feature_samples_;
  std::vector<int64_t> feature_sample_begin_;
  v1::BatchStatistics statistics_;
  std::vector<absl::Status> feature_status_;  // of the validation, one per feature
  bool bucketed_ = false;                     // whether the buckets of the stacks are filled
};

// A batch between the two halves of its preparation: sorted and counted, not yet cut into
// mini-batches. To be used by one thread at a time; must not outlive the preprocessor.
class SortedBatch {
 public:
  explicit SortedBatch(Recycler<PreprocessedBatch>* batches)
      : batches_(batches), batch_(batches->Take()) {}
  ~SortedBatch() {  // an unfinished batch gives its buffers back
    if (batch_ != nullptr) batches_->Give(std::move(batch_));
  }

  // Whether some (source slot, partition) exceeds a limit of its stack.
  bool needs_minibatches() const { return needs_minibatches_; }
  // Of a batch that Finish has refused.
  const v1::BatchStatistics& statistics() const { return batch_->statistics(); }

 private:
  friend class Preprocessor;

  Recycler<PreprocessedBatch>* batches_;
  std::unique_ptr<PreprocessedBatch> batch_;
  std::shared_ptr<const std::vector<PartitionLimits>> limits_;  // by stack, from Sort on
  bool needs_minibatches_ = false;
};

// Thread-safe: several batches may be in preparation at once.
class Preprocessor {
 public:
  // `model` and `plan` belong together; both must outlive the preprocessor and its batches, and so
  // must `cpu`. Results do not depend on its threads; null: everything runs on the caller's thread.
  // `alike`: one of the same plan, but for limits, and the same model; they remember the buckets of
  // rows together.
  Preprocessor(const v1::ModelConfig* model, const Plan* plan, CpuPool* cpu,
               const Preprocessor* alike = nullptr);

  // The limits of each stack, instead of those of the plan. Batches in preparation keep to the
  // limits that they began with.
  void SetLimits(std::vector<PartitionLimits> limits);
  std::vector<PartitionLimits> limits() const { return *CurrentLimits(); }

  // `inputs[i]` belongs to feature i of the config. Everything is checked before any work is done:
  // INVALID_ARGUMENT for malformed input, OUT_OF_RANGE for an id or a sample outside of its range,
  // RESOURCE_EXHAUSTED where no cut of the vocabulary keeps the limits, or the batch does not fit
  // its buffers. Messages name the feature, the position, the value and the allowed range.
  absl::StatusOr<std::shared_ptr<const PreprocessedBatch>> Run(
      absl::Span<const FeatureInput> inputs);

  // Run in steps, for replicas that cut their batches alike: Sort; then, if any replica
  // needs_minibatches, FindCuts on every replica; then Finish with the OR of all cuts (0 if none
  // needs any). Sort is done with the memory of `inputs` when it returns.
  absl::StatusOr<std::unique_ptr<SortedBatch>> Sort(absl::Span<const FeatureInput> inputs);
  // The cuts that this batch needs. RESOURCE_EXHAUSTED where none suffice.
  absl::StatusOr<CutSet> FindCuts(SortedBatch* batch);
  // Takes the batch out of `sorted`, unless it does not fit its buffers.
  absl::StatusOr<std::shared_ptr<const PreprocessedBatch>> Finish(SortedBatch* sorted, CutSet cuts);

 private:
  // What planning knows about a stack.
  struct StackInfo {
    StackShape shape;
    BucketMemo buckets;
  };
  using Limits = std::shared_ptr<const std::vector<PartitionLimits>>;
  using SlotWork =
      absl::FunctionRef<void(size_t stack_index, StackBatch*, int slot, SlotScratch* scratch)>;

  void RememberBuckets();
  Limits CurrentLimits() const;

  absl::Status Sort(absl::Span<const FeatureInput> inputs, SortedBatch* sorted);
  absl::Status Validate(absl::Span<const FeatureInput> inputs, std::vector<absl::Status>* found);
  absl::Status CheckSize(size_t stack_index, const StackBatch& stack) const;
  // INVALID_ARGUMENT names a sample whose weights sum to infinity.
  absl::Status CheckWeightSums(const PreprocessedBatch& batch) const;
  bool NeedsMinibatches(const SortedBatch& sorted) const;
  absl::Status CheckBuckets(size_t stack_index, const SortedBatch& sorted) const;
  void FillSlotBuckets(size_t stack_index, const Limits& limits, int slot, StackBatch* stack) const;
  // Nothing if they are filled already.
  void FillAllBuckets(SortedBatch* sorted);
  // Calls `work` for every source slot of every stack, spread over the threads.
  void ForEachSlot(PreprocessedBatch* batch, SlotWork work);
  int slots() const { return plan_.topology.sparsecores_per_shard; }

  const v1::ModelConfig& model_;
  const Plan& plan_;
  const DropRule drop_rule_;
  std::vector<StackInfo> stacks_;
  mutable absl::Mutex limits_mutex_;
  Limits limits_ ABSL_GUARDED_BY(limits_mutex_);
  std::shared_ptr<const MappedMemory> bucket_memory_;  // of all stacks that remember buckets
  // Whether the batch before was cut. The next one then fills its buckets while its slots are still
  // in the processor's cache; if they are not needed, only that time is lost.
  std::atomic<bool> expect_cuts_{false};
  CpuPool* const cpu_;  // may be null
  Recycler<SlotScratch> scratch_;
  Recycler<PreprocessedBatch> batches_;
};

// A chip sets buffers aside; what does not fit them is refused or dropped. They are those of
// TensorFlow's GetMinibatchesInCsr, whose chip is a replica here.
// RESOURCE_EXHAUSTED if a stack does not fit, with its name, count and capacity; `limits`: by
// stack. With `drop`, what lies behind the end of its buffer is cut off and counted in
// SlotCsr::dropped instead; too many mini-batches are refused all the same. Says in any case what
// each stack needs for each sample.
absl::Status FitBuffers(const std::vector<PartitionLimits>& limits, bool drop, const Plan& plan,
                        std::vector<StackBatch>* stacks);

}  // namespace emberd::preprocess
