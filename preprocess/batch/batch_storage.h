// The memory of a batch, from its first half (sorted) to what the shards get.
#pragma once

#include <cstdint>
#include <vector>

#include "preprocess/batch/extract.h"
#include "preprocess/batch/preprocessor.h"
#include "preprocess/batch/sample_layout.h"
#include "preprocess/batch/slot_buckets.h"
#include "preprocess/batch/slot_csr.h"
#include "preprocess/batch/stack_shape.h"
#include "preprocess/plan/plan.h"

namespace emberd::preprocess {

// One stack of a batch.
struct StackBatch {
  std::vector<const FeatureInput*> inputs;  // valid during preparation only
  std::vector<int64_t> feature_samples;     // by position in the stack
  std::vector<SlotLayout> layout;           // [slots]
  GainKind gain_kind = GainKind::kOne;
  int64_t samples = 0;
  std::vector<SlotCsr> slots;
  std::vector<SlotBuckets> buckets;            // [slots]; filled if the batch is cut
  std::vector<std::vector<SampleSpan>> spans;  // [slots]
};

// A batch that is, or becomes, immutable. Recycled with its buffers.
class BatchStorage final : public PreprocessedBatch {
 public:
  std::vector<StackBatchView> ShardView(int shard) const override;
  absl::Span<const int64_t> feature_samples() const override { return feature_samples_; }
  absl::Span<const int64_t> feature_sample_begin() const override { return feature_sample_begin_; }
  int64_t stack_samples(int stack) const override { return stacks_[stack].samples; }
  const v1::BatchStatistics& statistics() const override { return statistics_; }
  PartitionCounts partition_counts(int stack, int slot) const override;
  int64_t bytes() const override;

  // Takes the inputs' shapes: sample counts, canonical order, slots and spans.
  void LayOut(const Plan& plan, v1::SampleLayout layout, absl::Span<const FeatureInput> inputs);

  std::vector<StackBatch>& stacks() { return stacks_; }
  const std::vector<StackBatch>& stacks() const { return stacks_; }
  v1::BatchStatistics* mutable_statistics() { return &statistics_; }
  // Of the validation, one per feature.
  std::vector<absl::Status>& feature_status() { return feature_status_; }
  // Whether the slots' buckets are filled.
  bool bucketed = false;
  // Room for the bookkeeping of the pointer that shares this batch.
  static constexpr size_t kControlBytes = 128;
  void* control_block() { return control_block_; }

 private:
  const Plan* plan_ = nullptr;
  std::vector<StackBatch> stacks_;
  std::vector<int64_t> feature_samples_;
  std::vector<int64_t> feature_sample_begin_;
  std::vector<absl::Status> feature_status_;
  v1::BatchStatistics statistics_;
  alignas(16) unsigned char control_block_[kControlBytes];
};

}  // namespace emberd::preprocess
