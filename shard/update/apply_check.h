// What Engine::CheckApply and Engine::CheckApplyParts check.
#pragma once

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "shard/batch/batch.h"
#include "shard/engine.h"
#include "shard/store/model.h"
#include "shard/update/update_rule.h"

namespace emberd::shard {

// The gradients of the batch's i-th stack, or null.
const StackGradients* FindGradients(const ApplyInput& input, int stack);

// Optimizer numbers of this step: the config with the request's overrides.
absl::StatusOr<StepRule> ResolveRule(const StackSpec& stack, const StackGradients* gradients,
                                     int64_t step);

// Shapes, stacks named twice or unknown to the batch, finite values, rules.
absl::Status CheckApplyInput(const Model& model, const Batch& batch, const ApplyInput& input);

// That there is a part, and that all agree.
absl::Status CheckApplyParts(absl::Span<const ApplyPart> parts);

// The error for a batch whose model is gone.
absl::Status ModelDropped();

// The error for two ranks of a step that differ in `what`.
absl::Status RanksDisagree(size_t rank, absl::string_view what, absl::string_view value,
                           size_t other_rank, absl::string_view other_value);

// The first hyper-parameter, in the order of the alphabet, of which two sets have not the same
// value. An empty name: they agree.
struct HyperparameterDifference {
  std::string name;
  std::string value, other;  // as texts that tell any two values apart, or "not given"
};
using Hyperparameters = absl::flat_hash_map<std::string, double>;
HyperparameterDifference FindDifference(const Hyperparameters& values,
                                        const Hyperparameters& others);

// Index of the first NaN or infinity, or -1.
int64_t FindNonFinite(absl::Span<const float> values);

}  // namespace emberd::shard
