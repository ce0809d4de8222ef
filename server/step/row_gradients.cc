#include "server/step/row_gradients.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "shard/gather/tensor_kernels.h"

namespace emberd::step {
namespace {

using shard::StackEntries;

// Sums are sent if they have at most this share of the samples' rows: below that, they are worth
// what it takes to make them.
constexpr double kMostRows = 0.8;
// With more entries of a sample, summing costs more than sending, and shards share it.
constexpr int64_t kMostEntriesPerSample = 4;

// The entries by which the gradients of a stack are to become sums; null: they are not.
const StackEntries* EntriesToSum(const KeptShard& shard, int stack) {
  if (shard.entries.empty() || shard.entries[stack] == nullptr) return nullptr;
  const StackEntries& entries = *shard.entries[stack];
  const auto samples = static_cast<double>(entries.samples.size());
  const auto rows = static_cast<double>(entries.partition_ends.back());
  const bool fewer = rows > 0 && rows <= kMostRows * samples &&
                     static_cast<double>(entries.entry_count) <= kMostEntriesPerSample * samples;
  return fewer ? &entries : nullptr;
}

}  // namespace

struct RowSums::Stack {
  int index = 0;  // in the plan
  const StackEntries* entries = nullptr;
  float* sums = nullptr;
  std::vector<uint8_t> begun;  // rows that have a sum
  std::vector<bool> summed;    // by feature of the plan's stack
  // By feature: the one before it that has the same table, or -1. Its rows may be the same, and the
  // order of the sum is that of the features.
  std::vector<int> before;

  size_t rows() const { return begun.size(); }
};

RowSums::RowSums(const KeptBatch& batch, int shard, TakeBlock take_block)
    : batch_(batch), shard_(shard), take_block_(std::move(take_block)) {}
RowSums::~RowSums() = default;

// Whether no gradients but sums are sent of any batch like this.
bool RowSums::AllAreSummed() const {
  const KeptShard& kept = batch_.shards[shard_];
  for (int i = 0; i < static_cast<int>(kept.samples.size()); ++i) {
    if (!kept.samples[i].empty() && EntriesToSum(kept, i) == nullptr) return false;
  }
  return true;
}

void RowSums::Begin(const GradientInput* all) {
  begun_ = true;
  const auto& plans = batch_.model->plan.stacks;
  size_t floats = 0;
  for (int i = 0; i < static_cast<int>(plans.size()); ++i) {
    const StackEntries* const entries = EntriesToSum(batch_.shards[shard_], i);
    if (entries == nullptr || (all != nullptr && !AnyGiven(*all, plans[i]))) continue;
    Stack& stack = stacks_.emplace_back();
    stack.index = i;
    stack.entries = entries;
    stack.begun.resize(entries->partition_ends.back());
    stack.summed.resize(plans[i].features.size());
    std::vector<int> last(plans[i].tables.size(), -1);
    for (size_t f = 0; f < plans[i].features.size(); ++f) {
      int& of_table = last[plans[i].features[f].table_in_stack];
      stack.before.push_back(std::exchange(of_table, static_cast<int>(f)));
    }
    floats += stack.rows() * plans[i].embedding_dim;
  }
  if (floats == 0) return;
  const size_t bytes = floats * sizeof(float);
  if (take_block_ != nullptr) block_ = take_block_(static_cast<int64_t>(bytes));
  memory_ = block_ != nullptr
                ? std::shared_ptr<float>(block_, reinterpret_cast<float*>(block_->data()))
                : std::shared_ptr<float>(static_cast<float*>(std::malloc(bytes)), std::free);
  float* to = memory_.get();
  for (Stack& stack : stacks_) {
    stack.sums = to;
    to += stack.rows() * plans[stack.index].embedding_dim;
  }
}

void RowSums::Advance(const GradientInput& input) {
  if (!begun_ && !AllAreSummed()) return;
  if (!begun_) Begin(nullptr);
  for (Stack& stack : stacks_) {
    for (size_t f = 0; f < stack.summed.size(); ++f) {
      const bool in_turn = stack.before[f] < 0 || stack.summed[stack.before[f]];
      if (in_turn) SumFeature(input, &stack, f);
    }
  }
}

void RowSums::SumFeature(const GradientInput& input, Stack* stack, size_t feature) {
  const preprocess::StackPlan& plan = batch_.model->plan.stacks[stack->index];
  const preprocess::FeaturePlan& of = plan.features[feature];
  const FeatureGradientView& view = input.features[of.feature];
  if (stack->summed[feature] || !view.given()) return;
  stack->summed[feature] = true;
  const StackEntries& entries = *stack->entries;
  shard::RowSumArgs args;
  args.gradients = view.data;
  args.dtype = view.dtype;
  args.first_sample = batch_.feature_sample_begin[of.feature];
  args.dim = plan.tables[of.table_in_stack].embedding_dim;
  args.width = plan.embedding_dim;
  args.samples = entries.samples.data();
  args.offsets = entries.offsets.data();
  args.entries = entries.entries.data();
  args.begin = entries.feature_offsets[feature];
  args.end = entries.feature_offsets[feature + 1];
  args.sums = stack->sums;
  args.begun = stack->begun.data();
  finite_ = shard::AddToRowSums(args) && finite_;
}

void RowSums::CompleteSums(const GradientInput& input, Stack* stack) {
  // Those that were waited for do not come.
  for (size_t f = 0; f < stack->summed.size(); ++f) SumFeature(input, stack, f);
  const int64_t width = batch_.model->plan.stacks[stack->index].embedding_dim;
  for (size_t row = 0; row < stack->rows(); ++row) {
    if (stack->begun[row] == 0) std::fill_n(stack->sums + row * width, width, 0.0f);
  }
}

std::optional<ShardGradients> RowSums::Finish(const GradientInput& input) {
  if (!begun_) Begin(&input);
  if (stacks_.empty()) return std::nullopt;
  const auto& plans = batch_.model->plan.stacks;
  GradientInput others = input;
  for (const Stack& stack : stacks_) {
    for (const auto& feature : plans[stack.index].features) others.features[feature.feature] = {};
  }
  // A block holds one array after another, of all stacks.
  if (block_ != nullptr && GradientBytes(others, batch_, shard_, /*in_place=*/false) > 0) {
    return std::nullopt;
  }

  ShardGradients result;
  result.input = GradientsForShard(others, batch_, shard_, /*in_place=*/false);
  float* to = memory_.get();
  for (Stack& stack : stacks_) {
    if (!AnyGiven(input, plans[stack.index])) continue;
    shard::StackGradients& sent = result.input.stacks[stack.index];
    sent.of_rows = true;
    CompleteSums(input, &stack);
    const size_t floats = stack.rows() * plans[stack.index].embedding_dim;
    // A block has no gaps, and a stack before it may have got no gradients.
    if (block_ != nullptr) {
      if (stack.sums != to) std::memmove(to, stack.sums, floats * sizeof(float));
      stack.sums = to;
      to += floats;
    }
    sent.gradients = absl::MakeConstSpan(stack.sums, floats);
  }
  if (!finite_) return std::nullopt;
  result.input.owner = KeepBoth(std::move(result.input.owner), memory_);
  result.block = block_;
  return result;
}

}  // namespace emberd::step
