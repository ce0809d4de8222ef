#include "client/emberctl/plan_memory.h"

namespace emberd::emberctl {

PlanMemory MemoryOf(const v1::ModelPlan& plan) {
  PlanMemory memory;
  for (const v1::StackPlan& stack : plan.stacks()) {
    memory.partition_bytes += stack.bytes_per_partition();
  }
  memory.shard_bytes = memory.partition_bytes * plan.sparsecores_per_shard();
  return memory;
}

Padding PaddingOf(const v1::StackPlan& stack, const v1::TablePlan& table) {
  return {table.vocabulary_size() * table.embedding_dim(),
          table.padded_vocabulary_size() * stack.embedding_dim()};
}

Padding PaddingOf(const v1::ModelPlan& plan) {
  Padding all;
  for (const v1::StackPlan& stack : plan.stacks()) {
    for (const v1::TablePlan& table : stack.tables()) {
      const Padding one = PaddingOf(stack, table);
      all.weights += one.weights;
      all.cells += one.cells;
    }
  }
  return all;
}

}  // namespace emberd::emberctl
