#include "preprocess/batch/buffer_limits.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
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

}  // namespace emberd::preprocess
