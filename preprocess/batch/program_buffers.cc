#include "preprocess/batch/program_buffers.h"

#include "preprocess/batch/csr.h"

namespace emberd::preprocess {
namespace {

// An entry of the buffer of ids has a row, a sample and a gain; a row pointer has 4 bytes.
constexpr int64_t kEntryBytes = 12;
constexpr int64_t kPointerBytes = 4;

}  // namespace

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
