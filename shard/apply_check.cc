#include "shard/apply_check.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
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
  if (const int64_t bad = FindNonFinite(values); bad >= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradients of stack ", spec.name, ": value ", values[bad], " of sample ",
                     entries.samples[bad / spec.embedding_dim], ", column ",
                     bad % spec.embedding_dim, " must be finite"));
  }
  return absl::OkStatus();
}

}  // namespace

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
    for (const auto& [name, value] : gradients->hyperparameters) {
      if (absl::Status status = config::SetHyperparameter(&optimizer, name, value); !status.ok()) {
        return absl::Status(status.code(),
                            absl::StrCat("stack ", stack.name, ": ", status.message()));
      }
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

}  // namespace emberd::shard
