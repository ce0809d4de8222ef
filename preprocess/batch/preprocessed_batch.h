// A batch from its first half (sorted) to what the shards get: segments in CSR, spans of samples,
// counts.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "emberd/v1/model.pb.h"
#include "emberd/v1/statistics.pb.h"
#include "preprocess/batch/csr.h"
#include "preprocess/batch/cuts.h"
#include "preprocess/batch/feature_input.h"
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

}  // namespace emberd::preprocess
