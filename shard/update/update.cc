#include "shard/update/update.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/floats.h"
#include "base/status.h"
#include "config/fields.h"
#include "config/optimizers.h"
#include "shard/batch/batch.h"
#include "shard/store/model.h"
#include "shard/store/portable_numbers.h"
#include "shard/update/update_kernel.h"

namespace emberd::shard {
namespace {

// The gradients of a stack, or null.
const StackGradients* FindGradients(const ApplyInput& input, int stack) {
  const auto it = std::find_if(input.stacks.begin(), input.stacks.end(),
                               [stack](const StackGradients& g) { return g.stack == stack; });
  return it == input.stacks.end() ? nullptr : &*it;
}

// Stacks named twice or unknown to the batch.
absl::Status CheckNames(const Batch& batch, const ApplyInput& input) {
  for (const StackGradients& gradients : input.stacks) {
    const int stack = gradients.stack;
    const bool in_batch =
        std::any_of(batch.stacks().begin(), batch.stacks().end(),
                    [&](const StackEntries& entries) { return entries.stack == stack; });
    if (!in_batch || FindGradients(input, stack) != &gradients) {
      return absl::InvalidArgumentError(absl::StrCat(
          "gradients: stack ", stack, in_batch ? " is given twice" : " is not in the batch"));
    }
  }
  return absl::OkStatus();
}

// `checked`: they need not be finite, or are known to be.
absl::Status CheckValues(const StackSpec& spec, const StackEntries& entries,
                         absl::Span<const float> values, bool checked) {
  const int64_t rows = entries.samples.size();
  if (!values.empty() && static_cast<int64_t>(values.size()) != rows * spec.embedding_dim) {
    return absl::InvalidArgumentError(absl::StrCat("gradients of stack ", spec.name, ": ",
                                                   values.size(), " values; must be 0 or ", rows,
                                                   " samples x ", spec.embedding_dim));
  }
  if (spec.skip_nonfinite || checked) return absl::OkStatus();
  if (const int64_t bad = FindNonFinite(values); bad >= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradients of stack ", spec.name, ": value ", values[bad], " of sample ",
                     entries.samples[bad / spec.embedding_dim], ", column ",
                     bad % spec.embedding_dim, " must be finite"));
  }
  return absl::OkStatus();
}

// Whether there is a gradient for every sample of the batch.
absl::Status CheckGradientPlaces(const StackSpec& spec, const StackEntries& entries,
                                 const StackGradients& gradients) {
  const auto bad = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("gradients of stack ", spec.name, ": ", what));
  };
  if (!gradients.gradients.empty()) return bad("they are given both as values and as places");
  if (static_cast<int64_t>(gradients.features.size()) != entries.features()) {
    return bad(absl::StrCat("places of ", gradients.features.size(), " features; the batch has ",
                            entries.features()));
  }
  for (int64_t f = 0; f < entries.features(); ++f) {
    const FeatureRows<const float>& rows = gradients.features[f];
    const uint32_t begin = entries.feature_offsets[f], end = entries.feature_offsets[f + 1];
    if (rows.first == nullptr || begin == end) continue;
    if (entries.samples[begin] < rows.first_sample ||
        entries.samples[end - 1] - rows.first_sample >= rows.samples ||
        rows.width != spec.embedding_dim || rows.stride < rows.width) {
      return bad(absl::StrCat(
          "feature ", f, " has samples ", rows.first_sample, " + ", rows.samples, " of ",
          rows.width, " floats, ", rows.stride, " apart; must hold ", entries.samples[begin],
          " to ", entries.samples[end - 1], " of ", spec.embedding_dim, ", not less apart"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOfRows(const StackSpec& spec, const StackEntries& entries,
                         const StackGradients& gradients) {
  if (entries.unique_rows && gradients.features.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "gradients of stack ", spec.name, ": they are sums of rows, ",
      entries.unique_rows ? "and are given as places" : "but the batch did not return its rows"));
}

// The distinct rows of a batch as entries: each has a sample of its own, and the gain 1.
StackEntries EntriesOfRows(const StackEntries& entries, int64_t rows_per_partition) {
  BufferPool pool(0);
  const PooledArray<uint32_t>& rows = entries.distinct_rows;
  StackEntries result;
  result.stack = entries.stack;
  result.entry_count = static_cast<int64_t>(rows.size());
  result.partition_entries.resize(entries.partition_entries.size());
  result.partition_ends = entries.partition_ends;
  result.rows_touched = entries.rows_touched;
  result.samples = PooledArray<int32_t>(pool, rows.size());
  result.offsets = PooledArray<uint32_t>(pool, rows.size() + 1);
  result.entries = PooledArray<Entry>(pool, rows.size() + kEntryPadding);
  std::fill_n(result.entries.data(), result.entries.size(), Entry{0, 0});
  std::iota(result.samples.data(), result.samples.data() + rows.size(), 0);
  std::iota(result.offsets.data(), result.offsets.data() + rows.size() + 1, 0u);
  for (size_t i = 0; i < rows.size(); ++i) {
    result.entries[i] = {rows[i], 1.0f};
    ++result.partition_entries[rows[i] / rows_per_partition];
  }
  result.feature_offsets.assign(entries.feature_offsets.size(), static_cast<uint32_t>(rows.size()));
  result.feature_offsets.front() = 0;
  return result;
}

// Optimizer numbers of this step: the config with the request's overrides.
// `checked`: the update is of a log, whose writer may have allowed smaller rates.
absl::StatusOr<StepRule> ResolveRule(const StackSpec& stack, const Hyperparameters& overrides,
                                     int64_t step, bool checked) {
  v1::OptimizerConfig optimizer = stack.optimizer;
  if (optimizer.has_none()) {
    return absl::FailedPreconditionError(
        absl::StrCat("stack ", stack.name, " has no optimizer: its rows are only looked up"));
  }
  if (!overrides.empty()) {
    const absl::Status set =
        config::SetHyperparameters(&optimizer, {overrides.begin(), overrides.end()});
    if (!set.ok()) return Annotate(set, absl::StrCat("stack ", stack.name));
  }
  if (step < 0 && config::OptimizerNeedsStep(optimizer)) {
    return absl::InvalidArgumentError(absl::StrCat("step ", step, ": must be >= 0, the ",
                                                   config::OptimizerName(optimizer),
                                                   " optimizer of stack ", stack.name, " uses it"));
  }
  // With a smaller one, quotients may be infinite, and the row 0 or NaN.
  constexpr float kLeastFtrlRate = 1e-30f;
  const float rate = optimizer.learning_rate();
  if (optimizer.has_ftrl() && !optimizer.ftrl().multiply_linear_by_learning_rate() &&
      (checked ? rate == 0 : rate < kLeastFtrlRate)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "stack ", stack.name, ": learning_rate ", rate, " must be at least ", kLeastFtrlRate,
        ": this form of ftrl divides by it; multiply_linear_by_learning_rate has no such limit"));
  }
  return MakeStepRule(optimizer, step);
}

absl::Status RanksDisagree(int rank, absl::string_view what, absl::string_view value,
                           int other_rank, absl::string_view other_value) {
  return absl::InvalidArgumentError(absl::StrCat("rank ", rank, ": ", what, " is ", value, ", but ",
                                                 other_value, " for rank ", other_rank));
}

// The first hyper-parameter, in alphabetical order, of which two sets have not the same value.
// Values are texts that tell any two numbers apart, or "not given". An empty name: they agree.
struct HyperparameterDifference {
  std::string name;
  std::string value, other;
};
HyperparameterDifference FindDifference(const Hyperparameters& values,
                                        const Hyperparameters& others) {
  if (values == others) return {};
  const auto text = [](const Hyperparameters& of, const std::string& name) -> std::string {
    const auto it = of.find(name);
    return it == of.end() ? "not given" : config::NumberText(it->second);
  };
  std::set<std::string> names;
  for (const auto& [name, value] : values) names.insert(name);
  for (const auto& [name, value] : others) names.insert(name);
  for (const std::string& name : names) {
    const auto a = values.find(name), b = others.find(name);
    if (a != values.end() && b != others.end() && a->second == b->second) continue;
    return {name, text(values, name), text(others, name)};
  }
  return {};
}

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

absl::StatusOr<std::shared_ptr<const CheckedPart>> CheckedPart::Make(
    std::shared_ptr<const Batch> batch, ApplyInput input) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, batch->model());
  RETURN_IF_ERROR(CheckNames(*batch, input));
  if (input.skip && !input.stacks.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("gradients of ", input.stacks.size(),
                                                   " stacks came with a step that is skipped"));
  }
  std::shared_ptr<CheckedPart> part(new CheckedPart());
  for (const StackEntries& entries : batch->stacks()) {
    const StackSpec& spec = model->stack(entries.stack).spec();
    Stack stack;
    stack.entries = &entries;
    if (const StackGradients* gradients = FindGradients(input, entries.stack)) {
      if (gradients->of_rows) {
        RETURN_IF_ERROR(CheckOfRows(spec, entries, *gradients));
        stack.entries = &part->row_entries_.emplace_back(
            EntriesOfRows(entries, model->stack(entries.stack).rows_per_partition()));
      }
      if (gradients->features.empty()) {
        RETURN_IF_ERROR(CheckValues(spec, *stack.entries, gradients->gradients,
                                    gradients->of_rows || input.checked));
        if (!gradients->gradients.empty()) stack.gradients = gradients->gradients.data();
        stack.gradient_bytes = gradients->gradients.size() * sizeof(float);
      } else {
        RETURN_IF_ERROR(CheckGradientPlaces(spec, entries, *gradients));
        stack.features = gradients->features;
        stack.gradient_bytes = entries.samples.size() * spec.embedding_dim * sizeof(float);
      }
      stack.has_say = true;
      stack.hyperparameters = gradients->hyperparameters;
    }
    if (!input.skip) {  // a rate that the optimizer cannot do without comes with gradients alone
      ASSIGN_OR_RETURN(stack.rule,
                       ResolveRule(spec, stack.hyperparameters, input.step, input.checked));
    }
    part->stacks_.push_back(std::move(stack));
  }
  if (!input.skip) {
    ASSIGN_OR_RETURN(part->use_, model->Hold());
  }
  part->batch_ = std::move(batch);
  part->owner_ = std::move(input.owner);
  part->step_ = input.step;
  part->rng_seed_ = input.rng_seed;
  part->skip_ = input.skip;
  return part;
}

const CheckedPart::Stack* CheckedPart::Find(int stack) const {
  const auto it = std::find_if(stacks_.begin(), stacks_.end(),
                               [stack](const Stack& s) { return s.entries->stack == stack; });
  return it == stacks_.end() ? nullptr : &*it;
}

int64_t CheckedPart::gradient_bytes() const {
  int64_t bytes = 0;
  for (const Stack& stack : stacks_) bytes += stack.gradient_bytes;
  return bytes;
}

StagedUpdate::StagedUpdate(std::shared_ptr<const CheckedPart> part) : StagedUpdate(1) {
  Place(0, std::move(part));
}

absl::Status StagedUpdate::Add(int rank, std::shared_ptr<const CheckedPart> part) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, part->batch().model());
  RETURN_IF_ERROR(CheckStep(rank, *part, *model));
  for (const CheckedPart::Stack& stack : part->stacks()) {
    RETURN_IF_ERROR(CheckStack(rank, stack, model->stack(stack.entries->stack).spec().name));
  }
  Place(rank, std::move(part));
  return absl::OkStatus();
}

absl::Status StagedUpdate::CheckStep(int rank, const CheckedPart& part, const Model& model) const {
  if (part.stands_alone() && ranks() > 1) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank,
                                                   ": gradients are sums of rows, in a step of ",
                                                   ranks(), " ranks; only one alone may sum them"));
  }
  if (held_ == 0) return absl::OkStatus();
  const CheckedPart& first = *parts_[first_rank_];
  ASSIGN_OR_RETURN(const std::shared_ptr<Model> other, this->model());
  if (other.get() != &model) {
    return RanksDisagree(rank, "model_id", absl::StrCat(model.spec().model_id), first_rank_,
                         absl::StrCat(other->spec().model_id));
  }
  if (part.step() != first.step()) {
    return RanksDisagree(rank, "step", absl::StrCat(part.step()), first_rank_,
                         absl::StrCat(first.step()));
  }
  if (part.rng_seed() != first.rng_seed()) {
    return RanksDisagree(rank, "rng_seed", absl::StrCat(part.rng_seed()), first_rank_,
                         absl::StrCat(first.rng_seed()));
  }
  if (part.skip() == first.skip()) return absl::OkStatus();
  const auto text = [](bool skip) { return skip ? "true" : "false"; };
  return RanksDisagree(rank, absl::StrCat("skip of step ", part.step()), text(part.skip()),
                       first_rank_, text(first.skip()));
}

absl::Status StagedUpdate::CheckStack(int rank, const CheckedPart::Stack& stack,
                                      const std::string& name) const {
  constexpr int64_t kMaxEntries = std::numeric_limits<int32_t>::max();
  const auto found = stacks_.find(stack.entries->stack);
  if (found == stacks_.end()) return absl::OkStatus();
  const auto& [features, hyperparameters, entries] = found->second;
  if (stack.entries->features() != features.stack->entries->features()) {
    return RanksDisagree(rank, absl::StrCat("the number of features of stack ", name),
                         absl::StrCat(stack.entries->features()), features.rank,
                         absl::StrCat(features.stack->entries->features()));
  }
  if (entries + stack.entries->entry_count > kMaxEntries) {
    return absl::InvalidArgumentError(
        absl::StrCat("stack ", name, ": ", entries + stack.entries->entry_count, " entries of ",
                     held_ + 1, " ranks must be at most ", kMaxEntries));
  }
  if (!stack.has_say || hyperparameters.stack == nullptr) return absl::OkStatus();
  const HyperparameterDifference difference =
      FindDifference(stack.hyperparameters, hyperparameters.stack->hyperparameters);
  if (difference.name.empty()) return absl::OkStatus();
  return RanksDisagree(rank, absl::StrCat("hyperparameter ", difference.name, " of stack ", name),
                       difference.value, hyperparameters.rank, difference.other);
}

void StagedUpdate::Place(int rank, std::shared_ptr<const CheckedPart> part) {
  if (held_ == 0) first_rank_ = rank;
  for (const CheckedPart::Stack& stack : part->stacks()) {
    Agreed& agreed = stacks_[stack.entries->stack];
    if (agreed.features.stack == nullptr) agreed.features = {rank, &stack};
    if (agreed.hyperparameters.stack == nullptr && stack.has_say) {
      agreed.hyperparameters = {rank, &stack};
    }
    agreed.entries += stack.entries->entry_count;
  }
  parts_[rank] = std::move(part);
  ++held_;
}

int64_t StagedUpdate::gradient_bytes() const {
  int64_t bytes = 0;
  for (const auto& part : parts_) bytes += part == nullptr ? 0 : part->gradient_bytes();
  return bytes;
}

// ---- On its way into the tables

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
  if (args.stochastic_rounding) {
    args.rounding_key = SubKey(stack.rounding_key, store.first_partition() + k);
  }
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
