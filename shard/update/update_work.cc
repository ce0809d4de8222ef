#include "shard/update/update_work.h"

#include <algorithm>
#include <utility>

#include "shard/batch/row_order.h"
#include "shard/store/portable_numbers.h"
#include "shard/update/update_kernel.h"

namespace emberd::shard {
namespace {

// Points every sample of a part at its gradient.
const float** PointAtGradients(const CheckedPart::Stack& part, const StackUpdate& update,
                               const float** next) {
  const float* const zero = update.zero_row.data();
  const auto& samples = part.entries->samples;
  if (part.features.empty()) {
    const float* row = part.gradients == nullptr ? zero : part.gradients;
    const size_t step = part.gradients == nullptr ? 0 : update.zero_row.size();
    for (size_t i = 0; i < samples.size(); ++i) *next++ = row + i * step;
    return next;
  }
  for (size_t f = 0; f < part.features.size(); ++f) {
    const FeatureRows<const float>& rows = part.features[f];
    for (uint32_t i = part.entries->feature_offsets[f]; i < part.entries->feature_offsets[f + 1];
         ++i) {
      *next++ = rows.first == nullptr ? zero : rows(samples[i]);
    }
  }
  return next;
}

// Points every sample of all parts at its gradient.
void MakeGradientRows(absl::Span<const CheckedPart::Stack* const> parts, BufferPool& pool,
                      StackUpdate& update) {
  size_t samples = 0;
  for (const StackEntries* part : update.parts) samples += part->samples.size();
  update.zero_row.assign(update.store->width(), 0.0f);
  update.gradient_rows = PooledArray<const float*>(pool, samples);
  const float** next = update.gradient_rows.data();
  for (const CheckedPart::Stack* part : parts) next = PointAtGradients(*part, update, next);
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
  std::vector<const CheckedPart::Stack*> parts;
  for (const std::shared_ptr<const CheckedPart>& part : update_.parts()) {
    const CheckedPart::Stack* stack = part->Find(index);
    if (stack == nullptr || stack->entries->entry_count == 0) continue;
    update.parts.push_back(stack->entries);
    update.rows_touched &= stack->entries->rows_touched;
    parts.push_back(stack);
  }
  const auto has_gradients = [](const CheckedPart::Stack* part) {
    return part->gradients != nullptr || !part->features.empty();
  };
  if (parts.size() == 1 && parts[0]->features.empty()) {
    update.gradients = parts[0]->gradients;
  } else if (std::any_of(parts.begin(), parts.end(), has_gradients)) {
    MakeGradientRows(parts, pool, update);
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
  // Of a batch that is the only part, they may be in order already.
  PooledArray<Touch> ordered;
  const Touch* touches = nullptr;
  if (stack.parts.size() == 1 && !stack.parts[0]->touches.empty()) {
    touches = stack.parts[0]->touches[k].data();
  } else {
    ordered = OrderByRow(stack.parts, k, store.rows_per_partition(), pool);
    touches = ordered.data();
  }
  UpdateArgs args;
  args.touches = touches;
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
  if (!stack.rows_touched && !store.Complete()) {
    for (int64_t t = 0; t < args.touch_count; ++t) {
      if (t == 0 || touches[t].row != touches[t - 1].row) {
        store.EnsureRow(first_row + touches[t].row);
      }
    }
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
