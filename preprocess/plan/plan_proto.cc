// A plan as others see it: the message of the API, and the fingerprint by which processes find out
// that they planned differently.
#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "config/optimizers.h"
#include "preprocess/plan/plan.h"

namespace emberd::preprocess {
namespace {

// Bytes of weights and slots of one row.
int64_t RowBytes(const StackPlan& stack, const v1::TableConfig& table) {
  int64_t bytes = config::WeightBytes(table.storage_dtype()) * stack.embedding_dim;
  for (const config::SlotInfo& slot : config::OptimizerSlots(table.optimizer())) {
    bytes += 4 * (slot.one_per_row ? 1 : stack.embedding_dim);
  }
  return bytes;
}

void WriteTable(const TablePlan& table, v1::TablePlan* out) {
  out->set_name(table.name);
  out->set_vocabulary_size(table.vocabulary_size);
  out->set_padded_vocabulary_size(table.padded_vocabulary_size);
  out->set_embedding_dim(table.embedding_dim);
  out->set_row_offset(table.row_offset);
  out->set_shard_rotation(table.shard_rotation);
}

void WriteFeature(const FeaturePlan& feature, const StackPlan& stack, v1::FeaturePlan* out) {
  out->set_name(feature.name);
  out->set_table(stack.tables[feature.table_in_stack].name);
  out->set_batch_size(feature.batch_size);
  out->set_row_offset(feature.row_offset);
  out->set_col_offset(feature.col_offset);
  out->set_col_shift(feature.col_shift);
}

}  // namespace

v1::ModelPlan PlanToProto(const v1::ModelConfig& model, const Plan& plan) {
  const int64_t partitions = plan.topology.partitions();
  v1::ModelPlan out;
  out.set_shards(plan.topology.shards);
  out.set_sparsecores_per_shard(plan.topology.sparsecores_per_shard);
  out.set_partitions(static_cast<int32_t>(partitions));
  int64_t table_bytes = 0;
  for (const StackPlan& stack : plan.stacks) {
    v1::StackPlan* stack_out = out.add_stacks();
    stack_out->set_name(stack.name);
    stack_out->set_embedding_dim(stack.embedding_dim);
    stack_out->set_vocabulary_size(stack.rows_per_partition * partitions);
    stack_out->set_rows_per_partition(stack.rows_per_partition);
    for (const TablePlan& table : stack.tables) WriteTable(table, stack_out->add_tables());
    for (const FeaturePlan& feature : stack.features) {
      WriteFeature(feature, stack, stack_out->add_features());
    }
    stack_out->set_max_ids_per_partition(stack.max_ids_per_partition);
    stack_out->set_max_unique_ids_per_partition(stack.max_unique_ids_per_partition);
    const v1::TableConfig& first = model.tables(stack.tables.front().table);
    stack_out->set_optimizer(config::OptimizerName(first.optimizer()));
    for (const config::SlotInfo& slot : config::OptimizerSlots(first.optimizer())) {
      stack_out->add_slots(slot.name);
    }
    const int64_t bytes = stack.rows_per_partition * RowBytes(stack, first);
    stack_out->set_bytes_per_partition(bytes);
    table_bytes += bytes * partitions;
  }
  out.set_fingerprint(plan.fingerprint);
  out.set_table_bytes(table_bytes);
  return out;
}

uint64_t PlanFingerprint(const Plan& plan) {
  // Names go last in their line and are made of a closed alphabet, so no two plans share a text.
  std::string text = absl::StrCat("plan 1\n", plan.topology.shards, " ",
                                  plan.topology.sparsecores_per_shard, "\n");
  for (const StackPlan& stack : plan.stacks) {
    absl::StrAppend(&text, "stack ", stack.embedding_dim, " ", stack.rows_per_partition, " ",
                    stack.max_ids_per_partition, " ", stack.max_unique_ids_per_partition, " ",
                    stack.name, "\n");
    for (const TablePlan& table : stack.tables) {
      absl::StrAppend(&text, "table ", table.table, " ", table.vocabulary_size, " ");
      absl::StrAppend(&text, table.padded_vocabulary_size, " ", table.embedding_dim, " ");
      absl::StrAppend(&text, table.row_offset, " ", table.shard_rotation, " ", table.name, "\n");
    }
    for (const FeaturePlan& feature : stack.features) {
      absl::StrAppend(&text, "feature ", feature.feature, " ", feature.table_in_stack, " ");
      absl::StrAppend(&text, feature.batch_size, " ", feature.row_offset, " ", feature.name, "\n");
    }
  }
  return std::max<uint64_t>(Sha256Prefix(text), 1);
}

}  // namespace emberd::preprocess
