// What `emberctl explain` found out about a batch, and how it is shown.
#pragma once

#include <cstdint>
#include <memory>
#include <ostream>
#include <vector>

#include "absl/types/span.h"
#include "emberd/v1/model.pb.h"
#include "preprocess/batch/batch_statistics.h"
#include "preprocess/batch/preprocessor.h"
#include "preprocess/plan/plan.h"

namespace emberd::emberctl {

// Refers to model, plan and batch, which must outlive it.
struct Explanation {
  const v1::ModelConfig& model;
  const preprocess::Plan& plan;
  const preprocess::PreprocessedBatch& batch;
  uint64_t cuts = 0;  // preprocess::CutSet
  std::vector<preprocess::StackCost> costs;
};

// For people.
void PrintReport(const Explanation& explanation, std::ostream& out);
// For programs: an object with
//   model, plan (as DescribeModel answers), statistics (as Lookup answers),
//   num_minibatches, split_mask (in JAX's numbering of the nodes) and bucket_to_minibatch,
//   stacks: one object each, with the counts of the report, ids_per_partition and
//     unique_ids_per_partition [slot][partition], and segments: all buffers, one object per (shard,
//     slot, mini-batch) with row_pointers (exact ends of the shard's partitions), embedding_ids,
//     sample_ids and gains. Pads are 2147483647, 2147483647 and "NaN",
//   programs (see ProgramsJson).
void PrintExplanationJson(const Explanation& explanation, std::ostream& out);

// One for each replica, that is, for its chip.
using ChipBatches = absl::Span<const std::shared_ptr<const preprocess::PreprocessedBatch>>;
// For programs that compare with TensorFlow: an object with splits (its mask of the cuts), and
// chips, a list with an object for each batch: by stack the fields of a PartitionedCsrFormatTensor,
// with row_pointers_unpadded_size and ids_unpadded_size, the lengths of its arrays.
void PrintTensorFlowJson(const preprocess::Plan& plan, ChipBatches chips, std::ostream& out);

}  // namespace emberd::emberctl
