// The kernels of the optimizers, by family. A family is called with its own rules only.
#pragma once

#include <cstdint>

#include "shard/update_kernel.h"
#include "shard/update_rule.h"

namespace emberd::shard {

int64_t UpdateByDescent(const UpdateArgs& args, const StepRule& rule);  // SGD, Momentum
int64_t UpdateByAdagrad(const UpdateArgs& args, const StepRule& rule);  // Adagrad and its kin
int64_t UpdateByAdam(const UpdateArgs& args, const StepRule& rule);     // Adam, LaProp, RMSProp
int64_t UpdateByFtrl(const UpdateArgs& args, const StepRule& rule);

}  // namespace emberd::shard
