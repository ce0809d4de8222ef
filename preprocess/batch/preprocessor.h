// Features of a batch in, CSR mini-batches per (stack, shard) out. No I/O, no gRPC, no globals.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "emberd/v1/model.pb.h"
#include "emberd/v1/statistics.pb.h"
#include "preprocess/batch/csr.h"
#include "preprocess/batch/feature_input.h"
#include "preprocess/plan/plan.h"

namespace emberd::preprocess {

// By partition, over all mini-batches and before anything is dropped.
struct PartitionCounts {
  absl::Span<const int32_t> ids;     // distinct (sample, row) pairs
  absl::Span<const int32_t> unique;  // distinct rows
};

// A preprocessed batch. Immutable; views stay valid as long as it lives. Its buffers return to the
// Preprocessor that made it, so it must not outlive that one.
class PreprocessedBatch {
 public:
  virtual ~PreprocessedBatch() = default;
  // What shard `shard` needs: one view per stack of the plan, in plan order.
  virtual std::vector<StackBatchView> ShardView(int shard) const = 0;
  // Samples of feature i of the config in this batch.
  virtual absl::Span<const int64_t> feature_samples() const = 0;
  // First canonical sample of feature i of the config inside its stack, for this batch.
  virtual absl::Span<const int64_t> feature_sample_begin() const = 0;
  // Canonical samples of a stack: the sum over its features.
  virtual int64_t stack_samples(int stack) const = 0;
  virtual const v1::BatchStatistics& statistics() const = 0;
  // What source slot `slot` of a stack sends to each partition.
  virtual PartitionCounts partition_counts(int stack, int slot) const = 0;
  // Bytes of memory that the batch holds.
  virtual int64_t bytes() const = 0;
};

// A batch between the two halves of its preparation: sorted and counted, not yet cut into
// mini-batches. To be used by one thread at a time; must not outlive the preprocessor.
class SortedBatch {
 public:
  virtual ~SortedBatch() = default;
  // Whether some (source slot, partition) exceeds a limit of its stack.
  virtual bool needs_minibatches() const = 0;
};

struct PreprocessorOptions {
  // Worker threads; results do not depend on it. 1: everything runs on the caller's thread.
  int threads = 1;
};

// Thread-safe: several batches may be in preparation at once.
class Preprocessor {
 public:
  // `model` and `plan` belong together; both must outlive the preprocessor and its batches.
  static absl::StatusOr<std::unique_ptr<Preprocessor>> Create(const v1::ModelConfig* model,
                                                              const Plan* plan,
                                                              PreprocessorOptions options);
  virtual ~Preprocessor() = default;

  // `inputs[i]` belongs to feature i of the config. Everything is checked before any work is done:
  // INVALID_ARGUMENT for malformed input, OUT_OF_RANGE for an id or a sample outside of its range,
  // RESOURCE_EXHAUSTED where no cut of the vocabulary keeps the limits. Messages name the feature,
  // the position, the value and the allowed range.
  virtual absl::StatusOr<std::shared_ptr<const PreprocessedBatch>> Run(
      absl::Span<const FeatureInput> inputs) = 0;

  // Run in steps, for replicas that cut their batches alike: Sort; then, if any replica
  // needs_minibatches, FindCuts on every replica; then Finish with the OR of all cuts (0 if none
  // needs any). Sort is done with the memory of `inputs` when it returns.
  virtual absl::StatusOr<std::unique_ptr<SortedBatch>> Sort(
      absl::Span<const FeatureInput> inputs) = 0;
  // The cuts that this batch needs (splits.h). RESOURCE_EXHAUSTED where none suffice.
  virtual absl::StatusOr<uint64_t> FindCuts(SortedBatch* batch) = 0;
  virtual absl::StatusOr<std::shared_ptr<const PreprocessedBatch>> Finish(
      std::unique_ptr<SortedBatch> batch, uint64_t cuts) = 0;
};

}  // namespace emberd::preprocess
