#include "server/coordinator/places.h"

#include <algorithm>
#include <numeric>

#include "absl/types/span.h"

namespace emberd::server {
namespace {

// The canonical sample of each sample id of a slot.
std::vector<int32_t> CanonicalSamples(absl::Span<const preprocess::SampleSpan> spans) {
  std::vector<int32_t> canonical;
  for (const preprocess::SampleSpan& span : spans) {
    canonical.resize(span.slot_begin + span.count);
    std::iota(canonical.end() - span.count, canonical.end(), span.sample_begin);
  }
  return canonical;
}

bool IsWhole(const ServedModel& model, const preprocess::StackPlan& stack) {
  return std::all_of(stack.tables.begin(), stack.tables.end(),
                     [&](const auto& table) { return table.embedding_dim == stack.embedding_dim; });
}

}  // namespace

std::vector<shard::SumPlaces> PlacesOfSums(const ServedModel& model,
                                           const preprocess::PreprocessedBatch& batch,
                                           v1::DataType dtype, const SharedOutput& output) {
  std::vector<shard::SumPlaces> all;
  if (dtype != v1::FLOAT32) return all;
  for (size_t k = 0; k < model.plan.stacks.size(); ++k) {
    const preprocess::StackPlan& stack = model.plan.stacks[k];
    if (!IsWhole(model, stack)) continue;
    shard::SumPlaces& places = all.emplace_back();
    places.stack = static_cast<int>(k);
    for (const preprocess::FeaturePlan& feature : stack.features) {
      const int f = feature.feature;
      char* const first = output.memory.get() + output.layout.offsets[f];
      places.features.push_back({reinterpret_cast<float*>(first), stack.embedding_dim,
                                 static_cast<int64_t>(output.layout.strides[f] / sizeof(float)),
                                 batch.feature_sample_begin()[f], batch.feature_samples()[f]});
    }
  }
  return all;
}

void PassOver(const preprocess::StackBatchView& view, shard::SumPlaces* places) {
  std::vector<uint32_t>& bits = places->passed_over;
  bits.resize((int64_t{view.sample_count} + 31) / 32);
  for (int slot = 0; slot < view.slots; ++slot) {
    const std::vector<int32_t> canonical = CanonicalSamples(view.spans[slot]);
    for (int m = 0; m < view.minibatches; ++m) {
      const preprocess::CsrSegmentView& segment = view.segments[slot * view.minibatches + m];
      int64_t begin = segment.base;
      for (const int32_t end : segment.row_ends) {
        for (int64_t i = begin; i < end; ++i) {
          const int32_t sample = canonical[segment.sample_ids[i - segment.base]];
          bits[sample / 32] |= 1u << (sample % 32);
        }
        begin = preprocess::AlignCsr(end);
      }
    }
  }
}

}  // namespace emberd::server
