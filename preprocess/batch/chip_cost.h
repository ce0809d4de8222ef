// What a finished batch costs on the chips that emberd follows, beyond the statistics that every
// batch has: for programs and `emberctl explain`.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "emberd/v1/statistics.pb.h"
#include "preprocess/batch/preprocessor.h"
#include "preprocess/plan/plan.h"

namespace emberd::preprocess {

// One stack of a batch as TensorFlow gives it to a chip, whose source slots follow one another: the
// parts of its buffers that are used.
struct ChipCsr {
  // For each (source slot, mini-batch), slot-major, AlignCsr(P) pointers: the exact end of each
  // partition, then the begin of what follows.
  std::vector<int32_t> row_pointers;
  std::vector<int32_t> sample_ids;  // sample inside the source slot; kCsrPadId in pads
  std::vector<int32_t> token_ids;   // local row of the partition; kCsrPadId in pads
  std::vector<float> gains;         // 2147483648.0 in pads
};
ChipCsr MakeChipCsr(absl::Span<const SlotCsr> slots);

// How large the buffers of one stack are that a compiled lookup sets aside on a chip.
struct ProgramBuffers {
  int64_t samples = 0;          // at most
  int64_t id_capacity = 0;      // cells of the buffer of ids, a multiple of 8
  int64_t row_pointers = 0;     // cells of the buffer of row pointers
  int64_t activation_rows = 0;  // of each SparseCore
  int64_t bytes_per_sparsecore = 0;
};

// `samples[f]`: of feature f of the config, at most. `layout`: of the complete model.
ProgramBuffers SizeProgramBuffers(const Plan& plan, const StackPlan& stack, v1::SampleLayout layout,
                                  absl::Span<const int64_t> samples, int64_t ids_per_sample,
                                  int64_t minibatches);

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
