// What a plan costs.
#pragma once

#include <cstdint>

#include "emberd/v1/plan.pb.h"

namespace emberd::emberctl {

// Bytes of weights and slots; partitions are alike, and so are shards.
struct PlanMemory {
  int64_t partition_bytes = 0;
  int64_t shard_bytes = 0;
};
PlanMemory MemoryOf(const v1::ModelPlan& plan);

// Weights that somebody asked for, and cells that hold them: rows are padded for the partitions,
// columns for the width.
struct Padding {
  int64_t weights = 0;
  int64_t cells = 0;
};
Padding PaddingOf(const v1::StackPlan& stack, const v1::TablePlan& table);
Padding PaddingOf(const v1::ModelPlan& plan);

}  // namespace emberd::emberctl
