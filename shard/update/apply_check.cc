#include "shard/update/apply_check.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "config/numbers.h"
#include "config/optimizers.h"

namespace emberd::shard {
namespace {

constexpr uint32_t kExponent = 0x7f800000;

absl::Status CheckStack(const StackSpec& spec, const StackEntries& entries,
                        const StackGradients& gradients) {
  const int64_t rows = entries.samples.size();
  const absl::Span<const float> values = gradients.gradients;
  if (!values.empty() && static_cast<int64_t>(values.size()) != rows * spec.embedding_dim) {
    return absl::InvalidArgumentError(absl::StrCat("gradients of stack ", spec.name, ": ",
                                                   values.size(), " values; must be 0 or ", rows,
                                                   " samples x ", spec.embedding_dim));
  }
  if (spec.skip_nonfinite) return absl::OkStatus();
  if (const int64_t bad = FindNonFinite(values); bad >= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradients of stack ", spec.name, ": value ", values[bad], " of sample ",
                     entries.samples[bad / spec.embedding_dim], ", column ",
                     bad % spec.embedding_dim, " must be finite"));
  }
  return absl::OkStatus();
}

// Model and step.
absl::Status CheckSameStep(absl::Span<const ApplyPart> parts, const Model& model) {
  for (size_t r = 1; r < parts.size(); ++r) {
    const std::shared_ptr<Model> other = parts[r].batch->model();
    if (other == nullptr) return ModelDropped();
    if (other.get() != &model) {
      return RanksDisagree(r, "model_id", absl::StrCat(other->spec().model_id), 0,
                           absl::StrCat(model.spec().model_id));
    }
    if (parts[r].input.step != parts[0].input.step) {
      return RanksDisagree(r, "step", absl::StrCat(parts[r].input.step), 0,
                           absl::StrCat(parts[0].input.step));
    }
  }
  return absl::OkStatus();
}

// Names and values of the overrides of one stack.
absl::Status CheckSameHyperparameters(absl::Span<const ApplyPart> parts, int stack,
                                      const std::string& stack_name) {
  size_t first = 0;
  const StackGradients* known = nullptr;
  for (size_t r = 0; r < parts.size(); ++r) {
    const StackGradients* gradients = FindGradients(parts[r].input, stack);
    if (gradients == nullptr) continue;
    if (known == nullptr) {
      known = gradients;
      first = r;
      continue;
    }
    const HyperparameterDifference difference =
        FindDifference(gradients->hyperparameters, known->hyperparameters);
    if (difference.name.empty()) continue;
    return RanksDisagree(r,
                         absl::StrCat("hyperparameter ", difference.name, " of stack ", stack_name),
                         difference.value, first, difference.other);
  }
  return absl::OkStatus();
}

// Numbers of features, and of entries in all.
absl::Status CheckSameFeatures(absl::Span<const ApplyPart> parts, const Model& model) {
  constexpr int64_t kMaxEntries = std::numeric_limits<int32_t>::max();
  std::vector<int64_t> entries(model.stack_count());
  std::vector<std::pair<size_t, size_t>> known(model.stack_count());  // features, of which rank
  for (size_t r = 0; r < parts.size(); ++r) {
    for (const StackEntries& stack : parts[r].batch->stacks()) {
      const std::string& name = model.stack(stack.stack).spec().name;
      const size_t features = stack.feature_offsets.size() - 1;
      auto& [expected, first] = known[stack.stack];
      if (expected == 0) {
        expected = features;
        first = r;
      }
      if (features != expected) {
        return RanksDisagree(r, absl::StrCat("the number of features of stack ", name),
                             absl::StrCat(features), first, absl::StrCat(expected));
      }
      entries[stack.stack] += stack.entry_count;
      if (entries[stack.stack] > kMaxEntries) {
        return absl::InvalidArgumentError(absl::StrCat("stack ", name, ": ", entries[stack.stack],
                                                       " entries of ranks 0 to ", r,
                                                       " must be at most ", kMaxEntries));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ModelDropped() { return absl::NotFoundError("the model of this batch was dropped"); }

absl::Status RanksDisagree(size_t rank, absl::string_view what, absl::string_view value,
                           size_t other_rank, absl::string_view other_value) {
  return absl::InvalidArgumentError(absl::StrCat("rank ", rank, ": ", what, " is ", value, ", but ",
                                                 other_value, " for rank ", other_rank));
}

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

int64_t FindNonFinite(absl::Span<const float> values) {
  constexpr size_t kBlock = 4096;
  for (size_t begin = 0; begin < values.size(); begin += kBlock) {
    const absl::Span<const float> block = values.subspan(begin, kBlock);
    uint32_t bad = 0;  // no early exit: vectorises
    for (const float x : block) bad |= (std::bit_cast<uint32_t>(x) & kExponent) == kExponent;
    if (bad == 0) continue;
    for (size_t i = 0; i < block.size(); ++i) {
      if ((std::bit_cast<uint32_t>(block[i]) & kExponent) == kExponent) return begin + i;
    }
  }
  return -1;
}

const StackGradients* FindGradients(const ApplyInput& input, int stack) {
  const auto it = std::find_if(input.stacks.begin(), input.stacks.end(),
                               [stack](const StackGradients& g) { return g.stack == stack; });
  return it == input.stacks.end() ? nullptr : &*it;
}

absl::StatusOr<StepRule> ResolveRule(const StackSpec& stack, const StackGradients* gradients,
                                     int64_t step) {
  v1::OptimizerConfig optimizer = stack.optimizer;
  if (gradients != nullptr) {
    const auto& values = gradients->hyperparameters;
    const absl::Status set = config::SetHyperparameters(&optimizer, {values.begin(), values.end()});
    if (!set.ok()) {
      return absl::Status(set.code(), absl::StrCat("stack ", stack.name, ": ", set.message()));
    }
  }
  if (config::OptimizerNeedsStep(optimizer) && step < 0) {
    return absl::InvalidArgumentError(absl::StrCat("step ", step, ": must be >= 0, the ",
                                                   config::OptimizerName(optimizer),
                                                   " optimizer of stack ", stack.name, " uses it"));
  }
  if (optimizer.has_ftrl() && !optimizer.ftrl().multiply_linear_by_learning_rate() &&
      optimizer.learning_rate() == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "stack ", stack.name, ": learning_rate 0 must be > 0: this form of ftrl divides by it"));
  }
  return MakeStepRule(optimizer, step);
}

absl::Status CheckApplyInput(const Model& model, const Batch& batch, const ApplyInput& input) {
  for (size_t i = 0; i < input.stacks.size(); ++i) {
    const int stack = input.stacks[i].stack;
    const bool in_batch =
        std::any_of(batch.stacks().begin(), batch.stacks().end(),
                    [&](const StackEntries& entries) { return entries.stack == stack; });
    if (!in_batch || FindGradients(input, stack) != &input.stacks[i]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "gradients: stack ", stack, in_batch ? " is given twice" : " is not in the batch"));
    }
  }
  for (const StackEntries& entries : batch.stacks()) {
    const StackSpec& spec = model.stack(entries.stack).spec();
    const StackGradients* gradients = FindGradients(input, entries.stack);
    if (gradients != nullptr) {
      if (absl::Status status = CheckStack(spec, entries, *gradients); !status.ok()) return status;
    }
    if (auto rule = ResolveRule(spec, gradients, input.step); !rule.ok()) return rule.status();
  }
  return absl::OkStatus();
}

absl::Status CheckApplyParts(absl::Span<const ApplyPart> parts) {
  if (parts.empty()) {
    return absl::InvalidArgumentError("parts: 0 ranks; there must be at least 1");
  }
  const std::shared_ptr<Model> model = parts[0].batch->model();
  if (model == nullptr) return ModelDropped();
  if (absl::Status status = CheckSameStep(parts, *model); !status.ok()) return status;
  if (absl::Status status = CheckSameFeatures(parts, *model); !status.ok()) return status;
  for (int i = 0; i < model->stack_count(); ++i) {
    absl::Status status = CheckSameHyperparameters(parts, i, model->stack(i).spec().name);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace emberd::shard
