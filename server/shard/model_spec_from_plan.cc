#include "server/shard/model_spec_from_plan.h"

#include <utility>

namespace emberd::server {

shard::ModelSpec ModelSpecFromPlan(uint64_t model_id, const v1::ModelConfig& config,
                                   const preprocess::Plan& plan, int shard_index) {
  shard::ModelSpec spec;
  spec.model_id = model_id;
  spec.name = config.name();
  spec.seed = config.seed();
  spec.partitions = plan.topology.partitions();
  spec.partition_count = plan.topology.sparsecores_per_shard;
  spec.first_partition = shard_index * spec.partition_count;
  for (const preprocess::StackPlan& stack_plan : plan.stacks) {
    shard::StackSpec stack;
    stack.name = stack_plan.name;
    stack.embedding_dim = stack_plan.embedding_dim;
    stack.rows_per_partition = stack_plan.rows_per_partition;
    for (const preprocess::TablePlan& table_plan : stack_plan.tables) {
      stack.tables.push_back({.name = table_plan.name,
                              .vocabulary_size = table_plan.vocabulary_size,
                              .padded_vocabulary_size = table_plan.padded_vocabulary_size,
                              .embedding_dim = table_plan.embedding_dim,
                              .row_offset = table_plan.row_offset,
                              .shard_rotation = table_plan.shard_rotation,
                              .initializer = config.tables(table_plan.table).initializer()});
    }
    // Tables of a stack agree on these.
    const v1::TableConfig& first = config.tables(stack_plan.tables.front().table);
    stack.optimizer = first.optimizer();
    stack.storage_dtype = first.storage_dtype();
    stack.stochastic_rounding = first.update_rounding() == v1::STOCHASTIC;
    stack.skip_nonfinite = first.on_nonfinite_gradient() == v1::SKIP_ROW;
    stack.result_mode = first.result_mode();
    stack.quantized = first.has_quantization();
    stack.quantization = first.quantization();
    spec.stacks.push_back(std::move(stack));
  }
  return spec;
}

}  // namespace emberd::server
