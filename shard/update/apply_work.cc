#include "shard/update/apply_work.h"

#include <algorithm>
#include <utility>

#include "shard/batch/row_order.h"
#include "shard/store/counter_random.h"
#include "shard/update/apply_check.h"

namespace emberd::shard {
namespace {

const StackEntries* FindEntries(const Batch& batch, int stack) {
  const auto it = std::find_if(batch.stacks().begin(), batch.stacks().end(),
                               [stack](const StackEntries& e) { return e.stack == stack; });
  return it == batch.stacks().end() ? nullptr : &*it;
}

const float* DataOf(const StackGradients* gradients) {
  return gradients == nullptr || gradients->gradients.empty() ? nullptr
                                                              : gradients->gradients.data();
}

// Points every sample of all parts at its gradient. `arrays`: those of the parts, or null.
void MakeGradientRows(absl::Span<const float* const> arrays, BufferPool& pool,
                      StackUpdate& update) {
  const int width = update.store->width();
  size_t samples = 0;
  for (const StackEntries* part : update.parts) samples += part->samples.size();
  update.zero_row.assign(width, 0.0f);
  update.gradient_rows = PooledArray<const float*>(pool, samples);
  const float** next = update.gradient_rows.data();
  for (size_t r = 0; r < arrays.size(); ++r) {
    const size_t count = update.parts[r]->samples.size();
    const float* row = arrays[r] == nullptr ? update.zero_row.data() : arrays[r];
    const size_t step = arrays[r] == nullptr ? 0 : width;
    for (size_t i = 0; i < count; ++i) *next++ = row + i * step;
  }
}

}  // namespace

int64_t StackUpdate::partition_entries(int k) const {
  int64_t entries = 0;
  for (const StackEntries* part : parts) entries += part->partition_entries[k];
  return entries;
}

absl::StatusOr<std::shared_ptr<ApplyWork>> ApplyWork::Make(std::vector<ApplyPart> parts,
                                                           BufferPool& pool) {
  auto work = std::make_shared<ApplyWork>();
  work->parts_ = std::move(parts);
  work->model_ = work->parts_[0].batch->model();
  if (work->model_ == nullptr) return ModelDropped();
  for (int i = 0; i < work->model_->stack_count(); ++i) {
    if (absl::Status status = work->AddStack(i, pool); !status.ok()) return status;
  }
  work->counts_ = std::vector<Counts>(work->stacks_.size());
  return work;
}

absl::Status ApplyWork::AddStack(int index, BufferPool& pool) {
  StackUpdate update;
  update.stack = index;
  update.store = &model_->stack(index);
  const StackGradients* first = nullptr;  // whose hyper-parameters are those of all
  bool in_batch = false;
  std::vector<const float*> arrays;
  for (const ApplyPart& part : parts_) {
    const StackGradients* gradients = FindGradients(part.input, index);
    if (first == nullptr) first = gradients;
    const StackEntries* entries = FindEntries(*part.batch, index);
    in_batch |= entries != nullptr;
    if (entries == nullptr || entries->entry_count == 0) continue;
    if (!update.parts.empty() &&
        update.parts[0]->feature_offsets.size() != entries->feature_offsets.size()) {
      return absl::InvalidArgumentError("the parts of a step differ in their features");
    }
    update.parts.push_back(entries);
    arrays.push_back(DataOf(gradients));
  }
  if (!in_batch) return absl::OkStatus();
  absl::StatusOr<StepRule> rule = ResolveRule(update.store->spec(), first, parts_[0].input.step);
  if (!rule.ok()) return rule.status();
  update.rule = *rule;
  if (arrays.size() == 1) {
    update.gradients = arrays[0];
  } else if (std::any_of(arrays.begin(), arrays.end(), [](const float* a) { return a; })) {
    MakeGradientRows(arrays, pool, update);
  }
  stacks_.push_back(std::move(update));
  return absl::OkStatus();
}

void ApplyWork::TakeTurn() {
  for (StackUpdate& stack : stacks_) {
    if (stack.store->spec().stochastic_rounding)
      stack.rounding_key = stack.store->NextRoundingKey(parts_[0].input.step);
  }
}

int64_t ApplyWork::UpdatePartition(const StackUpdate& stack, int k, BufferPool& pool) {
  StackStore& store = *stack.store;
  const int64_t first_row = k * store.rows_per_partition();
  const PooledArray<Touch> touches = OrderByRow(stack.parts, k, store.rows_per_partition(), pool);
  UpdateArgs args;
  args.touches = touches.data();
  args.touch_count = stack.partition_entries(k);
  args.gradients = stack.gradients;
  args.gradient_rows = stack.gradient_rows.data();
  args.width = store.width();
  args.ranges = store.ranges();
  args.weights = store.weights() + first_row * store.row_bytes();
  args.dtype = store.dtype();
  args.stochastic_rounding = store.spec().stochastic_rounding;
  args.rounding_key = SubKey(stack.rounding_key, store.first_partition() + k);
  args.skip_nonfinite = store.spec().skip_nonfinite;
  for (size_t s = 0; s < store.slots().size(); ++s) {
    args.slots[s] = store.slots()[s].data() + first_row * store.slots()[s].columns;
  }
  if (!store.Complete()) {
    for (int64_t t = 0; t < args.touch_count; ++t) store.EnsureRow(first_row + touches[t].row);
  }
  const UpdateCounts updated = UpdateRows(args, stack.rule);
  Counts& counts = counts_[&stack - stacks_.data()];
  counts.updated += updated.updated;
  counts.skipped += updated.skipped;
  return updated.updated;
}

ApplyResult ApplyWork::Result() const {
  ApplyResult result;
  for (size_t i = 0; i < stacks_.size(); ++i) {
    result.stacks.push_back({stacks_[i].stack, counts_[i].updated, counts_[i].skipped});
    result.rows_updated += result.stacks.back().rows_updated;
    result.rows_skipped += result.stacks.back().rows_skipped;
  }
  return result;
}

}  // namespace emberd::shard
