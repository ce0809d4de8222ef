// What a batch needed, as the API shows it with every Lookup, and what it would cost on the chips
// that emberd follows: counts against limits, buffers, activations, gathered bytes and how evenly
// they spread.
#pragma once

#include <cstdint>
#include <vector>

#include "emberd/v1/model.pb.h"
#include "emberd/v1/statistics.pb.h"
#include "preprocess/batch/preprocessed_batch.h"
#include "preprocess/plan/plan.h"

namespace emberd::preprocess {

// Writes the statistics of a finished batch from its counters, without reading its entries;
// reuses the memory of `statistics`. `model` and `plan` belong together; `limits`: by stack.
void WriteStatistics(const v1::ModelConfig& model, const Plan& plan,
                     const std::vector<PartitionLimits>& limits,
                     const std::vector<StackBatch>& stacks, v1::BatchStatistics* statistics);

// Counts of one (source slot, partition) pair, before dropping and over all mini-batches.
struct PairCost {
  int slot = 0;
  int partition = 0;
  int64_t ids = 0;     // distinct (sample, row) pairs
  int64_t unique = 0;  // distinct rows
};

// One mini-batch of one stack: its fullest pair, after dropping.
struct MinibatchCost {
  int64_t ids = 0;             // entries over all pairs
  int64_t max_ids = 0;         // of one pair
  int64_t max_unique_ids = 0;  // of one pair
};

struct StackCost {
  v1::StackStatistics statistics;  // the batch's
  int64_t samples = 0;
  std::vector<PairCost> pairs;  // [slots * partitions], slot-major
  std::vector<MinibatchCost> minibatches;
  int64_t rows_touched = 0;  // distinct rows over all slots, after dropping: what an update writes
  std::vector<int64_t> partition_ids;  // entries that go to each partition
};

// One element per stack of the plan. What the batch's statistics do not hold is counted by reading
// every entry: for reports, not for each step.
std::vector<StackCost> BatchCost(const Plan& plan, const PreprocessedBatch& batch);

}  // namespace emberd::preprocess
