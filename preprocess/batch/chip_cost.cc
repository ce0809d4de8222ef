#include "preprocess/batch/chip_cost.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "config/optimizers.h"
#include "preprocess/batch/csr.h"

namespace emberd::preprocess {
namespace {

// Cuts a slot off at `capacity` cells, a multiple of 8; later mini-batches become empty.
void CutOff(int64_t capacity, SlotCsr* csr) {
  int64_t begin = 0;  // before anything was cut off
  for (int64_t at = 0; at < int64_t{csr->minibatches} * csr->partitions; ++at) {
    int32_t& row_end = csr->row_ends.data()[at];
    const int64_t end = row_end;
    csr->dropped += std::max<int64_t>(0, end - std::max(begin, capacity));
    row_end = static_cast<int32_t>(std::min(end, capacity));
    begin = AlignCsr(end);
  }
  csr->cells = std::min(csr->cells, capacity);
}

int64_t EntriesBehind(int64_t capacity, const SlotCsr& csr) {
  int64_t behind = 0;
  for (int m = 0; m < csr.minibatches; ++m) {
    for (int p = 0; p < csr.partitions; ++p) {
      const int64_t begin = std::max<int64_t>(csr.Begin(m, p), capacity);
      behind += std::max<int64_t>(0, csr.End(m, p) - begin);
    }
  }
  return behind;
}

absl::Status FitStack(const PartitionLimits& limits, bool drop, const StackPlan& plan,
                      StackBatch* stack) {
  int64_t needed = 0;
  for (const SlotCsr& slot : stack->slots) needed += slot.cells;
  const int64_t samples = std::max({stack->samples, plan.samples, int64_t{1}});
  stack->ids_per_sample = (needed + samples - 1) / samples;
  const int minibatches = stack->slots.front().minibatches;
  if (limits.minibatches > 0 && minibatches > limits.minibatches) {
    return absl::ResourceExhaustedError(
        absl::StrCat("stack '", plan.name, "': the batch makes ", minibatches,
                     " mini-batches; max_minibatches_per_sparsecore is ", limits.minibatches,
                     ". Raise it or the limits of ids per partition, or send fewer ids"));
  }
  const int64_t capacity = AlignCsr(limits.ids_per_sample * samples);
  if (limits.ids_per_sample == 0 || needed <= capacity) return absl::OkStatus();
  int64_t used = 0, remaining = 0;
  for (SlotCsr& slot : stack->slots) {
    const int64_t room = std::max<int64_t>(0, capacity - used);
    used += slot.cells;
    if (drop) {
      CutOff(room, &slot);
    } else {
      remaining += EntriesBehind(room, slot);
    }
  }
  if (drop || remaining == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "stack '", plan.name, "' needs ", needed, " cells of its buffer of ids, whose capacity is ",
      capacity, " (max_ids_per_chip_per_sample ", limits.ids_per_sample, " x ", samples,
      " samples); ids that do not fit: ", remaining, ". Raise max_ids_per_chip_per_sample to ",
      stack->ids_per_sample, ", set allow_id_dropping, or send fewer ids"));
}

// An entry of the buffer of ids has a row, a sample and a gain; a row pointer has 4 bytes.
constexpr int64_t kEntryBytes = 12;
constexpr int64_t kPointerBytes = 4;

}  // namespace

absl::Status FitBuffers(const std::vector<PartitionLimits>& limits, bool drop, const Plan& plan,
                        std::vector<StackBatch>* stacks) {
  absl::Status status;
  for (size_t k = 0; k < stacks->size(); ++k) {
    status.Update(FitStack(limits[k], drop, plan.stacks[k], &(*stacks)[k]));
  }
  return status;
}

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

ProgramBuffers SizeProgramBuffers(const Plan& plan, const StackPlan& stack,
                                  absl::Span<const int64_t> samples, int64_t ids_per_sample,
                                  int64_t minibatches) {
  const int slots = plan.topology.sparsecores_per_shard;
  ProgramBuffers buffers;
  for (const FeaturePlan& feature : stack.features) {
    buffers.samples += samples[feature.feature];
    buffers.activation_rows += (samples[feature.feature] + slots - 1) / slots;
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

// Entries of a slot that were not dropped.
int64_t KeptEntries(const SlotCsr& slot) {
  if (slot.dropped == 0) return slot.entries;
  int64_t kept = 0;
  for (int m = 0; m < slot.minibatches; ++m) {
    for (int p = 0; p < slot.partitions; ++p) kept += slot.End(m, p) - slot.Begin(m, p);
  }
  return kept;
}

int64_t SamplesOfFullestSlot(const std::vector<std::vector<SampleSpan>>& slots) {
  int64_t samples = 0;
  for (const std::vector<SampleSpan>& spans : slots) {
    for (const SampleSpan& span : spans) {
      samples = std::max(samples, int64_t{span.slot_begin} + span.count);
    }
  }
  return samples;
}

void WriteCounts(const StackBatch& batch, v1::StackStatistics* out) {
  int64_t ids = 0, unique = 0, duplicates = 0, max_ids = 0, max_unique = 0, fullest = 0, cells = 0,
          dropped = 0;
  for (const SlotCsr& slot : batch.slots) {
    ids += slot.entries;
    duplicates += slot.duplicates;
    cells += slot.cells;
    dropped += slot.dropped;
  }
  const int partitions = batch.slots.front().partitions;
  for (int p = 0; p < partitions; ++p) {
    int64_t ids_here = 0, unique_here = 0;
    for (const SlotCsr& slot : batch.slots) {
      ids_here += slot.partition_ids.data()[p];
      max_ids = std::max<int64_t>(max_ids, slot.partition_ids.data()[p]);
      unique_here = std::max<int64_t>(unique_here, slot.partition_unique.data()[p]);
    }
    fullest = std::max(fullest, ids_here);
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
  out->set_ids_per_chip_per_sample(batch.ids_per_sample);
  if (ids > 0) out->set_imbalance(static_cast<double>(fullest) * partitions / ids);
}

void WriteCost(const StackPlan& plan, const PartitionLimits& limits, v1::DataType storage_dtype,
               const StackBatch& batch, v1::StackStatistics* out) {
  int64_t entries = 0;
  for (const SlotCsr& slot : batch.slots) entries += KeptEntries(slot);
  out->set_pad_cells(out->required_buffer_size() - entries);
  out->set_bytes_gathered(entries * plan.embedding_dim * config::WeightBytes(storage_dtype));
  out->set_activation_bytes_per_sparsecore(SamplesOfFullestSlot(batch.spans) * plan.embedding_dim *
                                           static_cast<int64_t>(sizeof(float)));
  out->set_limit_ids_per_partition(limits.ids);
  out->set_limit_unique_ids_per_partition(limits.unique);
}

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

void WriteStatistics(const v1::ModelConfig& model, const Plan& plan,
                     const std::vector<PartitionLimits>& limits,
                     const std::vector<StackBatch>& stacks, v1::BatchStatistics* statistics) {
  statistics->Clear();
  int minibatches = 1;
  for (size_t k = 0; k < stacks.size(); ++k) {
    const StackPlan& stack = plan.stacks[k];
    v1::StackStatistics* out = statistics->add_stacks();
    out->set_stack(stack.name);
    WriteCounts(stacks[k], out);
    // Tables of a stack agree on their storage type.
    WriteCost(stack, limits[k], model.tables(stack.tables.front().table).storage_dtype(), stacks[k],
              out);
    minibatches = std::max(minibatches, stacks[k].slots.front().minibatches);
  }
  statistics->set_num_minibatches(minibatches);
}

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
