// The steps that turn features into a batch, spread over threads: validate, lay out, sort, find
// cuts, cut.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/cpu_pool.h"
#include "base/mapped_memory.h"
#include "base/recycler.h"
#include "emberd/v1/model.pb.h"
#include "preprocess/batch/batch_storage.h"
#include "preprocess/batch/slot_sorter.h"
#include "preprocess/batch/splits.h"

namespace emberd::preprocess {

// Thread-safe; one batch is worked on by one caller at a time.
class BatchSteps {
 public:
  BatchSteps(const v1::ModelConfig& model, const Plan& plan, int threads);

  // Checks the inputs, then sorts and counts them as one mini-batch.
  absl::Status Sort(absl::Span<const FeatureInput> inputs, BatchStorage* batch);
  // Whether some (source slot, partition) of a sorted batch exceeds its stack's limits.
  bool NeedsMinibatches(const BatchStorage& batch) const;
  // Puts the entries into buckets and finds the cuts that this batch needs.
  absl::StatusOr<CutSet> FindCuts(BatchStorage* batch);
  // Cuts the batch (whose cuts have been found, unless `cuts` is 0) and writes its statistics.
  void Finish(CutSet cuts, BatchStorage* batch);

 private:
  // What planning knows about a stack.
  struct StackInfo {
    StackShape shape;
    PartitionLimits limits;
    BucketMemo buckets;
  };
  using SlotWork =
      absl::FunctionRef<void(const StackInfo&, StackBatch*, int slot, SlotScratch* scratch)>;

  void RememberBuckets();
  int slots() const { return plan_.topology.sparsecores_per_shard; }
  absl::Status Validate(absl::Span<const FeatureInput> inputs, std::vector<absl::Status>* found);
  absl::Status CheckSize(const StackPlan& plan, const StackBatch& stack) const;
  absl::Status CheckBuckets(size_t stack_index, const StackBatch& stack) const;
  void FillSlotBuckets(const StackInfo& info, int slot, StackBatch* stack) const;
  // Calls `work` for every slot of every stack.
  void ForEachSlot(BatchStorage* batch, SlotWork work);

  const v1::ModelConfig& model_;
  const Plan& plan_;
  const bool allow_dropping_;
  std::vector<StackInfo> stacks_;
  MappedMemory bucket_memory_;  // of all stacks that remember buckets
  // Whether the batch before was cut. The next one then fills its buckets while its slots are still
  // in the processor's cache; if they are not needed, only that time is lost.
  std::atomic<bool> expect_cuts_{false};
  CpuPool workers_;
  Recycler<SlotScratch> scratch_;
};

}  // namespace emberd::preprocess
