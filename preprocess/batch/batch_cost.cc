#include "preprocess/batch/batch_cost.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"

namespace emberd::preprocess {
namespace {

void CountPairs(const PreprocessedBatch& batch, int stack, const Topology& topology,
                StackCost* cost) {
  cost->partition_ids.resize(topology.partitions());
  for (int s = 0; s < topology.sparsecores_per_shard; ++s) {
    const PartitionCounts counts = batch.partition_counts(stack, s);
    for (int p = 0; p < topology.partitions(); ++p) {
      cost->pairs.push_back({s, p, counts.ids[p], counts.unique[p]});
      cost->partition_ids[p] += counts.ids[p];
    }
  }
}

// The entries of a pair in one segment, which are ordered by (bucket, row, sample).
void CountEntries(absl::Span<const int32_t> rows, int partition, MinibatchCost* minibatch,
                  absl::flat_hash_set<int64_t>* touched) {
  const auto ids = static_cast<int64_t>(rows.size());
  int64_t unique = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i > 0 && rows[i] == rows[i - 1]) continue;
    ++unique;
    touched->insert(int64_t{partition} << 32 | rows[i]);
  }
  minibatch->ids += ids;
  minibatch->max_ids = std::max(minibatch->max_ids, ids);
  minibatch->max_unique_ids = std::max(minibatch->max_unique_ids, unique);
}

void CountSegments(const PreprocessedBatch& batch, int stack, const Topology& topology,
                   StackCost* cost) {
  absl::flat_hash_set<int64_t> touched;
  for (int shard = 0; shard < topology.shards; ++shard) {
    const StackBatchView view = batch.ShardView(shard)[stack];
    cost->minibatches.resize(view.minibatches);
    for (size_t i = 0; i < view.segments.size(); ++i) {
      const CsrSegmentView& segment = view.segments[i];
      int64_t begin = 0;
      for (size_t k = 0; k < segment.row_ends.size(); ++k) {
        const int64_t end = segment.row_ends[k] - segment.base;
        CountEntries(segment.embedding_ids.subspan(begin, end - begin),
                     shard * topology.sparsecores_per_shard + static_cast<int>(k),
                     &cost->minibatches[i % view.minibatches], &touched);
        begin = AlignCsr(segment.row_ends[k]) - segment.base;
      }
    }
  }
  cost->rows_touched = static_cast<int64_t>(touched.size());
}

}  // namespace

std::vector<StackCost> BatchCost(const Plan& plan, const PreprocessedBatch& batch) {
  std::vector<StackCost> costs(plan.stacks.size());
  for (int k = 0; k < static_cast<int>(costs.size()); ++k) {
    const v1::StackStatistics& statistics = batch.statistics().stacks(k);
    StackCost& cost = costs[k];
    cost.samples = batch.stack_samples(k);
    cost.ids = statistics.ids();
    cost.duplicate_ids = statistics.duplicate_ids();
    cost.dropped_ids = statistics.dropped_ids();
    cost.buffer_cells = statistics.required_buffer_size();
    cost.pad_cells = statistics.pad_cells();
    cost.activation_bytes_per_sparsecore = statistics.activation_bytes_per_sparsecore();
    cost.bytes_gathered = statistics.bytes_gathered();
    cost.imbalance = statistics.imbalance();
    CountPairs(batch, k, plan.topology, &cost);
    CountSegments(batch, k, plan.topology, &cost);
  }
  return costs;
}

}  // namespace emberd::preprocess
