#include "preprocess/batch_statistics.h"

#include <algorithm>

namespace emberd::preprocess {
namespace {

void WriteStack(const StackBatch& batch, v1::StackStatistics* out) {
  int64_t ids = 0, unique = 0, duplicates = 0, max_ids = 0, max_unique = 0, cells = 0, dropped = 0;
  for (const SlotCsr& slot : batch.slots) {
    ids += slot.entries;
    duplicates += slot.duplicates;
    cells += slot.cells;
    dropped += slot.dropped;
  }
  const int partitions = batch.slots.front().partitions;
  for (int p = 0; p < partitions; ++p) {
    int64_t unique_here = 0;
    for (const SlotCsr& slot : batch.slots) {
      max_ids = std::max<int64_t>(max_ids, slot.partition_ids.data()[p]);
      unique_here = std::max<int64_t>(unique_here, slot.partition_unique.data()[p]);
    }
    max_unique = std::max(max_unique, unique_here);
    unique += unique_here;
  }
  out->set_ids(ids);
  out->set_unique_ids(unique);
  out->set_duplicate_ids(duplicates);
  out->set_max_ids_per_partition(max_ids);
  out->set_max_unique_ids_per_partition(max_unique);
  out->set_required_buffer_size(cells);
  out->set_dropped_ids(dropped);
}

}  // namespace

void WriteStatistics(const Plan& plan, const std::vector<StackBatch>& stacks,
                     v1::BatchStatistics* statistics) {
  statistics->Clear();
  int minibatches = 1;
  for (size_t k = 0; k < stacks.size(); ++k) {
    v1::StackStatistics* out = statistics->add_stacks();
    out->set_stack(plan.stacks[k].name);
    WriteStack(stacks[k], out);
    minibatches = std::max(minibatches, stacks[k].slots.front().minibatches);
  }
  statistics->set_num_minibatches(minibatches);
}

}  // namespace emberd::preprocess
