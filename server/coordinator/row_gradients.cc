#include "server/coordinator/row_gradients.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/float_halves.h"
#include "server/coordinator/passed_sums.h"
#include "server/coordinator/request_reader.h"
#include "shard/gather/tensor_kernels.h"

namespace emberd::server {
namespace {

using shard::StackEntries;

// Sums are sent if they have at most this share of the samples' rows: below that, they are worth
// what it takes to make them.
constexpr double kMostRows = 0.8;
// With more entries of a sample, summing costs more than sending, and shards share it.
constexpr int64_t kMostEntriesPerSample = 4;

// The entries by which the gradients of a stack can become sums; null: they cannot.
const StackEntries* FindEntries(const KeptShard& shard, int stack) {
  if (shard.entries.empty() || shard.entries[stack] == nullptr) return nullptr;
  const StackEntries& entries = *shard.entries[stack];
  return entries.partition_ends.back() > 0 ? &entries : nullptr;
}

// The same; null: they are not to.
const StackEntries* EntriesToSum(const KeptShard& shard, int stack) {
  const StackEntries* const entries = FindEntries(shard, stack);
  if (entries == nullptr) return nullptr;
  const auto samples = static_cast<double>(entries->samples.size());
  const auto rows = static_cast<double>(entries->partition_ends.back());
  const bool fewer = rows <= kMostRows * samples &&
                     static_cast<double>(entries->entry_count) <= kMostEntriesPerSample * samples;
  return fewer ? entries : nullptr;
}

// [count, dim] to [count, width], zero in the columns beyond.
void CopyRows(const char* rows, v1::DataType dtype, int64_t count, int64_t dim, int64_t width,
              float* to) {
  if (dim == width) return CopyFloats(rows, dtype, count * dim, to);
  for (int64_t i = 0; i < count; ++i, to += width, rows += dim * ElementSize(dtype)) {
    CopyFloats(rows, dtype, dim, to);
    std::fill(to + dim, to + width, 0.0f);
  }
}

// What is sent to a shard, and what it is made of.
struct Owner {
  std::shared_ptr<const void> others;  // gradients of stacks that are not summed
  std::shared_ptr<float> sums;
};

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
  std::optional<PassedSums> passed;  // none: they are not to be

  size_t rows() const { return begun.size(); }
};

RowSums::RowSums(const KeptBatch& batch, int shard, TakeBlock take_block, bool pass_on)
    : batch_(batch), shard_(shard), take_block_(std::move(take_block)), pass_on_(pass_on) {}
RowSums::~RowSums() = default;

// Whether no gradients but sums are sent of any batch like this.
bool RowSums::AllAreSummed() const {
  const KeptShard& kept = batch_.shards[shard_];
  for (int i = 0; i < static_cast<int>(kept.samples.size()); ++i) {
    if (!kept.samples[i].empty() && EntriesToSum(kept, i) == nullptr) return false;
  }
  return true;
}

// Whether the trainer has rows of a feature of the stack, and so may send sums.
bool RowSums::MayComeSummed(int stack) const {
  const auto& features = batch_.model->plan.stacks[stack].features;
  return std::any_of(features.begin(), features.end(),
                     [&](const auto& feature) { return batch_.HasRows(feature.feature); });
}

void RowSums::Begin(const GradientInput* all, bool of_rows) {
  begun_ = true;
  const auto& plans = batch_.model->plan.stacks;
  size_t floats = 0;
  for (int i = 0; i < static_cast<int>(plans.size()); ++i) {
    const KeptShard& kept = batch_.shards[shard_];
    const StackEntries* const entries =
        of_rows && MayComeSummed(i) ? FindEntries(kept, i) : EntriesToSum(kept, i);
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
  const bool halves = static_cast<int64_t>(bytes) <= batch_.shards[shard_].max_joined_bytes;
  if (take_block_ != nullptr) block_ = take_block_(static_cast<int64_t>(bytes));
  memory_ = block_ != nullptr
                ? std::shared_ptr<float>(block_, reinterpret_cast<float*>(block_->data()))
                : std::shared_ptr<float>(static_cast<float*>(std::malloc(bytes)), std::free);
  float* to = memory_.get();
  for (Stack& stack : stacks_) {
    stack.sums = to;
    to += stack.rows() * plans[stack.index].embedding_dim;
    // What goes in pieces is not in the block.
    if (pass_on_ && block_ == nullptr) stack.passed.emplace(batch_, shard_, stack.index, halves);
  }
}

void RowSums::Advance(const GradientInput& input) {
  if (!begun_ && !input.of_rows && !AllAreSummed()) return;
  if (!begun_) Begin(nullptr, input.of_rows);
  for (Stack& stack : stacks_) {
    if (stack.passed.has_value() && stack.passed->MayPass(input)) continue;
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
  if (stack->summed[feature] || !view.rows.given()) return;
  stack->summed[feature] = true;
  if (view.of_rows) {
    TakeSums(view, of.feature, plan.tables[of.table_in_stack].embedding_dim, stack);
    return;
  }
  const StackEntries& entries = *stack->entries;
  shard::RowSumArgs args;
  args.width = plan.embedding_dim;
  args.samples = entries.samples.data();
  args.offsets = entries.offsets.data();
  args.entries = entries.entries.data();
  args.sums = stack->sums;
  args.begun = stack->begun.data();
  args.dtype = view.dtype;
  args.dim = plan.tables[of.table_in_stack].embedding_dim;
  args.end = entries.feature_offsets[feature];
  const int32_t* const end = args.samples + entries.feature_offsets[feature + 1];
  for (const RowRuns::Run& run : view.rows.runs()) {
    args.gradients = run.data;
    args.first_sample = batch_.feature_sample_begin[of.feature] + run.begin;
    args.begin = args.end;
    const int64_t next_sample = args.first_sample + run.end - run.begin;
    args.end = std::lower_bound(args.samples + args.begin, end, next_sample) - args.samples;
    finite_ = shard::AddToRowSums(args) && finite_;
  }
}

void RowSums::TakeSums(const FeatureGradientView& view, int feature, int64_t dim, Stack* stack) {
  const int64_t width = batch_.model->plan.stacks[stack->index].embedding_dim;
  const int64_t row_bytes = dim * ElementSize(view.dtype);
  const absl::Span<const int32_t> lower = view.lower_rows;
  const int64_t lower_begin = view.rows.rows() - static_cast<int64_t>(lower.size());
  const auto lower_from = [&](int64_t row) {  // where those of rows from `row` on begin
    return lower_begin + (std::lower_bound(lower.begin(), lower.end(), row) - lower.begin());
  };
  int64_t first = 0;  // row of the tensor that comes next
  for (const PlaceRange& range : batch_.row_places[feature]) {
    const int64_t begin = std::exchange(first, first + range.end - range.begin);
    if (range.shard != shard_) continue;
    std::fill(stack->begun.begin() + range.begin, stack->begun.begin() + range.end, 1);
    const int64_t place = range.begin - begin;  // of row 0 of the tensor
    view.rows.ForRows(begin, first, row_bytes, [&](int64_t row, int64_t count, const char* from) {
      CopyRows(from, view.dtype, count, dim, width, stack->sums + (place + row) * width);
    });
    view.rows.ForRows(lower_from(begin), lower_from(first), row_bytes,
                      [&](int64_t at, int64_t count, const char* from) {
                        for (int64_t i = 0; i < count; ++i) {
                          const int64_t row = lower[at + i - lower_begin];
                          AddLowerHalves(from + i * row_bytes, dim,
                                         stack->sums + (place + row) * width);
                        }
                      });
  }
}

void RowSums::LeaveBlock() {
  size_t floats = 0;
  for (const Stack& stack : stacks_) {
    floats += stack.rows() * batch_.model->plan.stacks[stack.index].embedding_dim;
  }
  const size_t bytes = floats * sizeof(float);
  std::shared_ptr<float> memory(static_cast<float*>(std::malloc(bytes)), std::free);
  std::memcpy(memory.get(), memory_.get(), bytes);
  for (Stack& stack : stacks_) stack.sums = memory.get() + (stack.sums - memory_.get());
  memory_ = std::move(memory);
  block_ = nullptr;
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
  if (!begun_) Begin(&input, input.of_rows);
  if (stacks_.empty()) return std::nullopt;
  const auto& plans = batch_.model->plan.stacks;
  GradientInput others = input;
  for (const Stack& stack : stacks_) {
    for (const auto& feature : plans[stack.index].features) others.features[feature.feature] = {};
  }
  // A block holds one array after another, of all stacks.
  const bool mixed = GradientBytes(others, batch_, shard_, /*in_place=*/false) > 0;
  if (mixed && block_ != nullptr) {
    if (!input.of_rows) return std::nullopt;
    LeaveBlock();
  }

  ShardGradients result;
  result.input = GradientsForShard(others, batch_, shard_, /*in_place=*/false);
  float* to = memory_.get();
  for (Stack& stack : stacks_) {
    if (!AnyGiven(input, plans[stack.index])) continue;
    shard::StackGradients& sent = result.input.stacks[stack.index];
    sent.of_rows = true;
    auto pieces = stack.passed.has_value() ? stack.passed->Pass(input) : std::nullopt;
    if (pieces.has_value()) {
      result.pieces.push_back(*std::move(pieces));
      continue;
    }
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
  if (!finite_ && !input.of_rows) return std::nullopt;
  result.input.owner = std::make_shared<Owner>(Owner{std::move(result.input.owner), memory_});
  result.block = block_;
  return result;
}

}  // namespace emberd::server
