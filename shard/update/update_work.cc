#include "shard/update/update_work.h"

#include <algorithm>
#include <utility>

#include "shard/batch/row_order.h"
#include "shard/store/portable_numbers.h"
#include "shard/update/update_kernel.h"

namespace emberd::shard {
namespace {

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

UpdateWork::UpdateWork(std::shared_ptr<Model> model, StagedUpdate update, BufferPool& pool)
    : model_(std::move(model)), update_(std::move(update)), counts_(update_.stacks().size()) {
  for (const auto& [stack, agreed] : update_.stacks()) AddStack(stack, agreed.rule(), pool);
}

void UpdateWork::AddStack(int index, const StepRule& rule, BufferPool& pool) {
  StackUpdate update;
  update.stack = index;
  update.store = &model_->stack(index);
  update.rule = rule;
  std::vector<const float*> arrays;
  for (const std::shared_ptr<const CheckedPart>& part : update_.parts()) {
    const CheckedPart::Stack* stack = part->Find(index);
    if (stack == nullptr || stack->entries->entry_count == 0) continue;
    update.parts.push_back(stack->entries);
    arrays.push_back(stack->gradients);
  }
  if (arrays.size() == 1) {
    update.gradients = arrays[0];
  } else if (std::any_of(arrays.begin(), arrays.end(), [](const float* a) { return a; })) {
    MakeGradientRows(arrays, pool, update);
  }
  stacks_.push_back(std::move(update));
}

void UpdateWork::TakePlace() {
  const CheckedPart& any = *update_.parts()[0];
  for (StackUpdate& stack : stacks_) {
    if (!stack.store->spec().stochastic_rounding) continue;
    stack.rounding_key = stack.store->NextRoundingKey(any.step(), any.rng_seed());
  }
}

int64_t UpdateWork::UpdatePartition(const StackUpdate& stack, int k, BufferPool& pool) {
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
  RowChanges& changes = store.changes(k);
  if (changes.tracking()) {
    for (int64_t t = 0; t < args.touch_count; ++t) {
      changes.BeforeWrite(store.ChunkOf(first_row + touches[t].row));
    }
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

ApplyResult UpdateWork::Result() const {
  ApplyResult result;
  for (size_t i = 0; i < stacks_.size(); ++i) {
    result.stacks.push_back({stacks_[i].stack, counts_[i].updated, counts_[i].skipped});
    result.rows_updated += result.stacks.back().rows_updated;
    result.rows_skipped += result.stacks.back().rows_skipped;
  }
  return result;
}

}  // namespace emberd::shard
