#include "server/coordinator/row_gradients.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "base/finite.h"
#include "shard/gather/tensor_kernels.h"

namespace emberd::server {
namespace {

using shard::StackEntries;

// Sums are sent if they have at most this share of the samples' rows: below that, they are worth
// what it takes to make them.
constexpr double kMostRows = 0.8;
// With more entries of a sample, summing costs more than sending, and shards share it.
constexpr int64_t kMostEntriesPerSample = 4;

// The entries by which the gradients of a stack become sums; null: they are not to.
const StackEntries* EntriesToSum(const GradientInput& input, const KeptBatch& batch, int stack,
                                 const KeptShard& shard) {
  if (shard.entries.empty() || shard.entries[stack] == nullptr) return nullptr;
  const auto& features = batch.model->plan.stacks[stack].features;
  const bool given = std::any_of(features.begin(), features.end(), [&](const auto& feature) {
    return input.features[feature.feature].data != nullptr;
  });
  if (!given) return nullptr;
  const StackEntries& entries = *shard.entries[stack];
  const auto samples = static_cast<double>(entries.samples.size());
  const auto rows = static_cast<double>(entries.partition_ends.back());
  const bool fewer = rows <= kMostRows * samples &&
                     static_cast<double>(entries.entry_count) <= kMostEntriesPerSample * samples;
  return fewer ? &entries : nullptr;
}

void SumStack(const GradientInput& input, const KeptBatch& batch,
              const preprocess::StackPlan& stack, const StackEntries& entries, float* to) {
  std::vector<uint8_t> begun(entries.partition_ends.back());
  shard::RowSumArgs args;
  args.width = stack.embedding_dim;
  args.samples = entries.samples.data();
  args.offsets = entries.offsets.data();
  args.entries = entries.entries.data();
  args.sums = to;
  args.begun = begun.data();
  // In canonical order, as the samples are.
  for (size_t f = 0; f < stack.features.size(); ++f) {
    const preprocess::FeaturePlan& plan = stack.features[f];
    const FeatureGradientView& view = input.features[plan.feature];
    if (view.data == nullptr) continue;
    args.gradients = view.data;
    args.dtype = view.dtype;
    args.first_sample = batch.feature_sample_begin[plan.feature];
    args.dim = stack.tables[plan.table_in_stack].embedding_dim;
    args.begin = entries.feature_offsets[f];
    args.end = entries.feature_offsets[f + 1];
    shard::AddToRowSums(args);
  }
  for (size_t row = 0; row < begun.size(); ++row) {
    if (begun[row] == 0) std::fill_n(to + row * args.width, args.width, 0.0f);
  }
}

// What is sent to a shard, and what it is made of.
struct Owner {
  std::shared_ptr<const void> others;  // gradients of stacks that are not summed
  std::shared_ptr<float> sums;
};

std::shared_ptr<float> TakeFloats(size_t floats, const std::shared_ptr<SharedBlock>& block) {
  if (block != nullptr) return {block, reinterpret_cast<float*>(block->data())};
  return {static_cast<float*>(std::malloc(floats * sizeof(float))), std::free};
}

}  // namespace

std::optional<shard::ApplyInput> RowSumsForShard(const GradientInput& input, const KeptBatch& batch,
                                                 int shard,
                                                 const std::shared_ptr<SharedBlock>& block) {
  const auto& stacks = batch.model->plan.stacks;
  std::vector<const StackEntries*> summed(stacks.size());
  GradientInput others = input;
  size_t total = 0;
  for (size_t i = 0; i < stacks.size(); ++i) {
    summed[i] = EntriesToSum(input, batch, static_cast<int>(i), batch.shards[shard]);
    if (summed[i] == nullptr) continue;
    total += summed[i]->partition_ends.back() * stacks[i].embedding_dim;
    for (const auto& feature : stacks[i].features) others.features[feature.feature].data = nullptr;
  }
  // A block holds one array after another, of all stacks.
  const bool mixed = GradientBytes(others, batch, shard, /*in_place=*/false) > 0;
  if (total == 0 || (mixed && block != nullptr)) return std::nullopt;

  shard::ApplyInput result = GradientsForShard(others, batch, shard, /*in_place=*/false);
  auto owner = std::make_shared<Owner>(Owner{std::move(result.owner), TakeFloats(total, block)});
  float* to = owner->sums.get();
  for (size_t i = 0; i < stacks.size(); ++i) {
    if (summed[i] == nullptr) continue;
    const size_t floats = summed[i]->partition_ends.back() * stacks[i].embedding_dim;
    SumStack(input, batch, stacks[i], *summed[i], to);
    result.stacks[i].gradients = absl::MakeConstSpan(to, floats);
    result.stacks[i].of_rows = true;
    if (FindNonFinite(result.stacks[i].gradients) >= 0) return std::nullopt;
    to += floats;
  }
  result.owner = std::move(owner);
  return result;
}

}  // namespace emberd::server
