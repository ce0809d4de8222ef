#include "server/step/row_gradients.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "shard/gather/tensor_kernels.h"

namespace emberd::step {
namespace {

// Sums are sent if they have at most this share of the samples' rows: below that, they are worth
// what it takes to make them.
constexpr double kMostRows = 0.8;
// With more entries of a sample, summing costs more than sending, and shards share it.
constexpr int64_t kMostEntriesPerSample = 4;

// A stack of the plan whose gradients become sums.
struct SummedStack {
  int index = 0;
  const shard::StackEntries* entries = nullptr;

  int64_t rows() const { return entries->partition_ends.back(); }
};

// Whether the sums of its rows are clearly fewer bytes than the gradients of its samples.
bool AreFewer(const shard::StackEntries& entries) {
  const auto samples = static_cast<double>(entries.samples.size());
  const auto rows = static_cast<double>(entries.partition_ends.back());
  return rows > 0 && rows <= kMostRows * samples &&
         static_cast<double>(entries.entry_count) <= kMostEntriesPerSample * samples;
}

std::vector<SummedStack> StacksToSum(const GradientInput& input, const KeptBatch& batch,
                                     const KeptShard& shard) {
  std::vector<SummedStack> stacks;
  for (size_t i = 0; i < shard.entries.size(); ++i) {
    const shard::StackEntries* const entries = shard.entries[i].get();
    if (entries != nullptr && AreFewer(*entries) && AnyGiven(input, batch.model->plan.stacks[i])) {
      stacks.push_back({static_cast<int>(i), entries});
    }
  }
  return stacks;
}

// Writes a sum for each row, 0 where it has no gradient. Whether all are finite.
bool SumStack(const GradientInput& input, const KeptBatch& batch, const SummedStack& stack,
              float* sums) {
  const preprocess::StackPlan& plan = batch.model->plan.stacks[stack.index];
  const shard::StackEntries& entries = *stack.entries;
  std::vector<uint8_t> begun(stack.rows());
  bool finite = true;
  for (size_t f = 0; f < plan.features.size(); ++f) {
    const preprocess::FeaturePlan& of = plan.features[f];
    const FeatureGradientView& view = input.features[of.feature];
    if (!view.given()) continue;
    shard::RowSumArgs args;
    args.gradients = view.data;
    args.dtype = view.dtype;
    args.first_sample = batch.feature_sample_begin[of.feature];
    args.dim = plan.tables[of.table_in_stack].embedding_dim;
    args.width = plan.embedding_dim;
    args.samples = entries.samples.data();
    args.offsets = entries.offsets.data();
    args.entries = entries.entries.data();
    args.begin = entries.feature_offsets[f];
    args.end = entries.feature_offsets[f + 1];
    args.sums = sums;
    args.begun = begun.data();
    finite = shard::AddToRowSums(args) && finite;
  }
  for (size_t row = 0; row < begun.size(); ++row) {
    if (begun[row] == 0) std::fill_n(sums + row * plan.embedding_dim, plan.embedding_dim, 0.0f);
  }
  return finite;
}

}  // namespace

std::optional<ShardGradients> SumsForShard(const GradientInput& input, const KeptBatch& batch,
                                           int shard, const TakeBlock& take_block) {
  const auto& plans = batch.model->plan.stacks;
  const std::vector<SummedStack> stacks = StacksToSum(input, batch, batch.shards[shard]);
  if (stacks.empty()) return std::nullopt;
  size_t floats = 0;
  GradientInput others = input;
  for (const SummedStack& stack : stacks) {
    floats += stack.rows() * plans[stack.index].embedding_dim;
    for (const auto& feature : plans[stack.index].features) others.features[feature.feature] = {};
  }
  const size_t bytes = floats * sizeof(float);
  ShardGradients result;
  if (take_block != nullptr) result.block = take_block(static_cast<int64_t>(bytes));
  // A block holds one array after another, of all stacks.
  if (result.block != nullptr && GradientBytes(others, batch, shard, /*in_place=*/false) > 0) {
    return std::nullopt;
  }
  const std::shared_ptr<float> memory =
      result.block != nullptr
          ? std::shared_ptr<float>(result.block, reinterpret_cast<float*>(result.block->data()))
          : std::shared_ptr<float>(static_cast<float*>(std::malloc(bytes)), std::free);
  result.input = GradientsForShard(others, batch, shard, /*in_place=*/false);
  float* to = memory.get();
  for (const SummedStack& stack : stacks) {
    if (!SumStack(input, batch, stack, to)) return std::nullopt;
    shard::StackGradients& sent = result.input.stacks[stack.index];
    sent.of_rows = true;
    sent.gradients = absl::MakeConstSpan(to, stack.rows() * plans[stack.index].embedding_dim);
    to += sent.gradients.size();
  }
  result.input.owner = KeepBoth(std::move(result.input.owner), memory);
  return result;
}

}  // namespace emberd::step
