#include "preprocess/batch/chip_cost.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "preprocess/batch/csr.h"

namespace emberd::preprocess {
namespace {

// An entry of the buffer of ids has a row, a sample and a gain; a row pointer has 4 bytes.
constexpr int64_t kEntryBytes = 12;
constexpr int64_t kPointerBytes = 4;

}  // namespace

ChipCsr MakeChipCsr(absl::Span<const SlotCsr> slots) {
  ChipCsr chip;
  int64_t begin = 0;  // of the slot
  for (const SlotCsr& slot : slots) {
    for (int m = 0; m < slot.minibatches; ++m) {
      const size_t block = chip.row_pointers.size() + AlignCsr(slot.partitions);
      for (int p = 0; p < slot.partitions; ++p) {
        chip.row_pointers.push_back(static_cast<int32_t>(begin + slot.End(m, p)));
      }
      chip.row_pointers.resize(block, static_cast<int32_t>(AlignCsr(chip.row_pointers.back())));
    }
    for (int64_t i = 0; i < slot.cells; ++i) {
      const int32_t id = slot.embedding_ids.data()[i];
      chip.token_ids.push_back(id);
      chip.sample_ids.push_back(slot.sample_ids.data()[i]);
      chip.gains.push_back(id == kCsrPadId ? 2147483648.0f : slot.gains.data()[i]);
    }
    begin += slot.cells;
  }
  return chip;
}

ProgramBuffers SizeProgramBuffers(const Plan& plan, const StackPlan& stack, v1::SampleLayout layout,
                                  absl::Span<const int64_t> samples, int64_t ids_per_sample,
                                  int64_t minibatches) {
  const int slots = plan.topology.sparsecores_per_shard;
  ProgramBuffers buffers;
  for (const FeaturePlan& feature : stack.features) {
    buffers.samples += samples[feature.feature];
    buffers.activation_rows += (samples[feature.feature] + slots - 1) / slots;
  }
  if (layout == v1::STACK_THEN_SPLIT) {  // the cut is across all features together
    buffers.activation_rows = (buffers.samples + slots - 1) / slots;
  }
  buffers.id_capacity = AlignCsr(ids_per_sample * buffers.samples);
  buffers.row_pointers = minibatches * slots * AlignCsr(plan.topology.partitions());
  buffers.bytes_per_sparsecore =
      (buffers.id_capacity * kEntryBytes + buffers.row_pointers * kPointerBytes) / slots +
      buffers.activation_rows * stack.embedding_dim * static_cast<int64_t>(sizeof(float));
  return buffers;
}

// ---- What a batch costs

namespace {

void CountPairs(const PreprocessedBatch& batch, int stack, const Topology& topology,
                StackCost* cost) {
  cost->partition_ids.resize(topology.partitions());
  for (int s = 0; s < topology.sparsecores_per_shard; ++s) {
    const SlotCsr& slot = batch.slots(stack)[s];
    for (int p = 0; p < topology.partitions(); ++p) {
      const int32_t ids = slot.partition_ids.data()[p];
      cost->pairs.push_back({s, p, ids, slot.partition_unique.data()[p]});
      cost->partition_ids[p] += ids;
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
    costs[k].statistics = batch.statistics().stacks(k);
    costs[k].samples = batch.stack_samples(k);
    CountPairs(batch, k, plan.topology, &costs[k]);
    CountSegments(batch, k, plan.topology, &costs[k]);
  }
  return costs;
}

}  // namespace emberd::preprocess
