#include "server/step/gradients.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "base/bfloat16.h"
#include "server/step/request_reader.h"

namespace emberd::step {
namespace {

// Writes the rows of one stack: [samples, width], zero where a feature has no gradient, and in
// padding columns.
void WriteStackRows(const GradientInput& input, const KeptBatch& batch,
                    const preprocess::StackPlan& stack, absl::Span<const int32_t> samples,
                    float* to) {
  const int width = stack.embedding_dim;
  size_t next = 0;
  for (const preprocess::FeaturePlan& plan :
       stack.features) {  // in canonical order, as the samples are
    const FeatureGradientView& view = input.features[plan.feature];
    const int64_t first = batch.feature_sample_begin[plan.feature];
    const int64_t end = first + batch.feature_samples[plan.feature];
    const int64_t dim = stack.tables[plan.table_in_stack].embedding_dim;
    const int64_t given = view.given() ? dim : 0;
    for (; next < samples.size() && samples[next] < end; ++next) {
      float* to_row = to + next * width;
      if (given > 0) {
        const int64_t row = samples[next] - first;
        CopyFloats(view.data + row * dim * ElementSize(view.dtype), view.dtype, dim, to_row);
      }
      std::fill(to_row + given, to_row + width, 0.0f);
    }
  }
  std::fill(to + next * width, to + samples.size() * width, 0.0f);
}

// Whether the gradients of a stack lie in shared memory as shards need them.
bool LiesInPlace(const GradientInput& input, const preprocess::StackPlan& stack) {
  bool any = false;
  for (const preprocess::FeaturePlan& feature : stack.features) {
    const FeatureGradientView& view = input.features[feature.feature];
    if (!view.given()) continue;
    any = true;
    if (!view.shared || view.dtype != v1::FLOAT32 ||
        stack.tables[feature.table_in_stack].embedding_dim != stack.embedding_dim ||
        reinterpret_cast<uintptr_t>(view.data) % sizeof(float) != 0) {
      return false;
    }
  }
  return any;
}

std::vector<shard::FeatureRows<const float>> PlacesOfGradients(const GradientInput& input,
                                                               const KeptBatch& batch,
                                                               const preprocess::StackPlan& stack) {
  std::vector<shard::FeatureRows<const float>> places;
  for (const preprocess::FeaturePlan& feature : stack.features) {
    const auto* const first = reinterpret_cast<const float*>(input.features[feature.feature].data);
    places.push_back({first, stack.embedding_dim, stack.embedding_dim,
                      batch.feature_sample_begin[feature.feature],
                      batch.feature_samples[feature.feature]});
  }
  return places;
}

// By stack: of the gradients that a shard is sent.
std::vector<size_t> FloatsForShard(const GradientInput& input, const KeptBatch& batch, int shard,
                                   bool in_place) {
  const auto& stacks = batch.model->plan.stacks;
  std::vector<size_t> floats(stacks.size());
  for (size_t i = 0; i < stacks.size(); ++i) {
    if (in_place && LiesInPlace(input, stacks[i])) continue;
    floats[i] = AnyGiven(input, stacks[i])
                    ? batch.shards[shard].samples[i].size() * stacks[i].embedding_dim
                    : 0;
  }
  return floats;
}

}  // namespace

void CopyFloats(const char* elements, v1::DataType dtype, int64_t count, float* to) {
  if (dtype == v1::FLOAT32) {
    std::memcpy(to, elements, count * sizeof(float));
  } else {
    FromBfloat16Bytes(elements, absl::MakeSpan(to, count));
  }
}

bool AnyGiven(const GradientInput& input, const preprocess::StackPlan& stack) {
  return std::any_of(stack.features.begin(), stack.features.end(),
                     [&](const auto& feature) { return input.features[feature.feature].given(); });
}

bool AnyInPlace(const GradientInput& input, const KeptBatch& batch) {
  const auto& stacks = batch.model->plan.stacks;
  return std::any_of(stacks.begin(), stacks.end(),
                     [&](const auto& stack) { return LiesInPlace(input, stack); });
}

int64_t GradientBytes(const GradientInput& input, const KeptBatch& batch, int shard,
                      bool in_place) {
  const std::vector<size_t> floats = FloatsForShard(input, batch, shard, in_place);
  return static_cast<int64_t>(std::accumulate(floats.begin(), floats.end(), size_t{0}) *
                              sizeof(float));
}

shard::ApplyInput GradientsForShard(const GradientInput& input, const KeptBatch& batch, int shard,
                                    bool in_place, const std::shared_ptr<SharedBlock>& block) {
  const auto& stacks = batch.model->plan.stacks;
  const KeptShard& kept = batch.shards[shard];
  const std::vector<size_t> floats = FloatsForShard(input, batch, shard, in_place);
  const size_t total = std::accumulate(floats.begin(), floats.end(), size_t{0});
  std::shared_ptr<float> memory =
      block != nullptr
          ? std::shared_ptr<float>(block, reinterpret_cast<float*>(block->data()))
          : std::shared_ptr<float>(
                static_cast<float*>(std::malloc(std::max<size_t>(total, 1) * sizeof(float))),
                std::free);

  shard::ApplyInput result;
  result.step = input.step;
  result.rng_seed = input.rng_seed;
  float* to = memory.get();
  for (size_t i = 0; i < stacks.size(); ++i) {
    shard::StackGradients& stack = result.stacks.emplace_back();
    stack.stack = static_cast<int>(i);
    stack.hyperparameters = input.hyperparameters[i];
    if (in_place && LiesInPlace(input, stacks[i])) {
      stack.features = PlacesOfGradients(input, batch, stacks[i]);
    }
    if (floats[i] == 0) continue;
    WriteStackRows(input, batch, stacks[i], kept.samples[i], to);
    stack.gradients = absl::MakeConstSpan(to, floats[i]);
    to += floats[i];
  }
  result.owner = KeepBoth(std::move(memory), in_place ? input.regions : std::vector<NamedRegion>());
  return result;
}

}  // namespace emberd::step
