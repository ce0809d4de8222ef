// What the optimizers of OptimizerConfig keep per row and what they can be told per step: facts
// that planning, the engine and request checking share.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "emberd/v1/model.pb.h"

namespace emberd::config {

// One state vector that an optimizer keeps beside each row.
struct SlotInfo {
  std::string name;          // e.g. "accumulator"
  bool one_per_row = false;  // one float per row instead of one per column
  float initial_value = 0;
};

// "sgd", "adagrad", ... : the name of the field of OptimizerConfig.kind that is set; empty if none
// is.
std::string OptimizerName(const v1::OptimizerConfig& optimizer);
// Slots in storage order.
std::vector<SlotInfo> OptimizerSlots(const v1::OptimizerConfig& optimizer);
// True if the formula uses the global step number (ApplyGradientsRequest.step).
bool OptimizerNeedsStep(const v1::OptimizerConfig& optimizer);

// Sets one hyper-parameter by its field name in OptimizerConfig or in the kind that is set
// ("learning_rate", "beta1"). Returns the value that the field now has: `value`, rounded to float32
// unless the field is double. INVALID_ARGUMENT for a name that this optimizer does not have, for
// flags and initial values, and for a value outside of the field's range; the optimizer is then
// unchanged.
absl::StatusOr<double> SetHyperparameter(v1::OptimizerConfig* optimizer, absl::string_view name,
                                         double value);

}  // namespace emberd::config
