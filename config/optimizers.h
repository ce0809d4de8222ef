// What the optimizers of OptimizerConfig keep per row and what they can be told per step: facts
// that planning, the engine and request checking share.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
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

// `value` as the hyper-parameter `name` of this optimizer holds it: rounded to float32 unless the
// field is double. `name` is that of a field of OptimizerConfig or of the kind that is set
// ("learning_rate", "beta1"). INVALID_ARGUMENT for a name that this optimizer does not have, for
// flags and initial values, and for a value outside of the field's range.
absl::StatusOr<double> HyperparameterValue(const v1::OptimizerConfig& optimizer,
                                           absl::string_view name, double value);

// Sets hyper-parameters, value by name. INVALID_ARGUMENT for what HyperparameterValue refuses (the
// first name in the order of the map), and for values that do not go together, such as clip bounds
// out of order; only all values together need to, in whatever order they might be set. The
// optimizer is then unchanged.
absl::Status SetHyperparameters(v1::OptimizerConfig* optimizer,
                                const std::map<std::string, double>& values);

}  // namespace emberd::config
