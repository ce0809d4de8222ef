#include "preprocess/plan/plan_fingerprint.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/sha256.h"

namespace emberd::preprocess {

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
  const auto digest = Sha256(text);
  uint64_t fingerprint = 0;
  for (int byte = 0; byte < 8; ++byte) fingerprint = fingerprint << 8 | digest[byte];
  return fingerprint == 0 ? 1 : fingerprint;
}

}  // namespace emberd::preprocess
