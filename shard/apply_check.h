// What Engine::CheckApply and Engine::CheckApplyParts check.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shard/batch.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/update_rule.h"

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

// Index of the first NaN or infinity, or -1.
int64_t FindNonFinite(absl::Span<const float> values);

}  // namespace emberd::shard
