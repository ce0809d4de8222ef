// The optimizers of OptimizerConfig: their checks and defaults, what they keep per row and what
// they can be told per step. Facts that planning, the engine and request checking share.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "emberd/v1/model.pb.h"

namespace emberd::config {

// Ordered clip bounds, and no option that the optimizer would ignore. `path` is that of
// `optimizer`, "" for none.
absl::Status CheckOptimizer(const v1::OptimizerConfig& optimizer, const std::string& path);

// Chooses the kind where none is set and writes every default.
void CompleteOptimizer(v1::OptimizerConfig* optimizer);

// Bytes of one weight. `dtype` is one that TableConfig.storage_dtype allows.
inline int64_t WeightBytes(v1::DataType dtype) { return dtype == v1::FLOAT32 ? 4 : 2; }

// One state vector that an optimizer keeps beside each row.
struct SlotInfo {
  std::string name;          // e.g. "accumulator"
  bool one_per_row = false;  // one float per row instead of one per column
  float initial_value = 0;
};

// "sgd", "adagrad", ... : the name of the field of OptimizerConfig.kind that is set; empty if none
// is.
std::string OptimizerName(const v1::OptimizerConfig& optimizer);
// Whether a complete model can be trained: its tables have an optimizer, which is not `none`.
inline bool CanTrain(const v1::ModelConfig& model) {
  return !model.tables(0).optimizer().has_none();
}
// Slots in storage order.
std::vector<SlotInfo> OptimizerSlots(const v1::OptimizerConfig& optimizer);

// INVALID_ARGUMENT names the first of the values, `columns` for each id, that the slot never has:
// sums of squares and counts are not negative, and the next step would make NaN of it. For values
// that come from outside; they are finite. A custom optimizer's may be any.
absl::Status CheckSlotValues(const v1::OptimizerConfig& optimizer, const std::string& table,
                             const std::string& slot, absl::Span<const int64_t> ids,
                             absl::Span<const float> values);

// True if the formula uses the global step number (ApplyGradientsRequest.step).
bool OptimizerNeedsStep(const v1::OptimizerConfig& optimizer);

// Sets one hyper-parameter and returns what its field then holds: the value rounded to float32
// unless the field is double. `name` is that of a field of OptimizerConfig or of the kind that is
// set
// ("learning_rate", "beta1"). INVALID_ARGUMENT for a name that this optimizer does not have, for
// flags and initial values, and for a value outside of the field's range. Whether all values go
// together is for CheckOptimizer to say.
absl::StatusOr<double> SetHyperparameter(v1::OptimizerConfig* optimizer, absl::string_view name,
                                         double value);

// Sets hyper-parameters, value by name. INVALID_ARGUMENT for what SetHyperparameter refuses (the
// first name in the order of the map), and for values that do not go together, such as clip bounds
// out of order; what counts is all values together, not the order in which they are set. On an
// error the optimizer is unchanged.
absl::Status SetHyperparameters(v1::OptimizerConfig* optimizer,
                                const std::map<std::string, double>& values);

}  // namespace emberd::config
