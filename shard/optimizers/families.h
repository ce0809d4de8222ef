// The kernels of the optimizers, by family. A family is called with its own rules only.
#pragma once

#include <cstdint>

#include "shard/update/update_kernel.h"
#include "shard/update/update_rule.h"

namespace emberd::shard {

UpdateCounts UpdateByDescent(const UpdateArgs& args, const StepRule& rule);  // SGD, Momentum
UpdateCounts UpdateByAdagrad(const UpdateArgs& args, const StepRule& rule);  // Adagrad and its kin
UpdateCounts UpdateByAdam(const UpdateArgs& args, const StepRule& rule);  // Adam, LaProp, RMSProp
UpdateCounts UpdateByFtrl(const UpdateArgs& args, const StepRule& rule);

}  // namespace emberd::shard
