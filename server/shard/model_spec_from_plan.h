// From a plan of the whole cluster to what one shard's engine must know.
#pragma once

#include <cstdint>

#include "emberd/v1/model.pb.h"
#include "preprocess/plan/plan.h"
#include "shard/types.h"

namespace emberd::server {

// `config` is complete and `plan` was made from it.
shard::ModelSpec ModelSpecFromPlan(uint64_t model_id, const v1::ModelConfig& config,
                                   const preprocess::Plan& plan, int shard_index);

}  // namespace emberd::server
