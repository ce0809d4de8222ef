#include "client/emberctl/plan_output.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/emberctl/output.h"

namespace emberd::emberctl {

std::string Limit(int32_t limit) { return limit == 0 ? "none" : absl::StrCat(limit); }

void PrintStacks(const v1::ModelPlan& plan, std::ostream& out) {
  std::vector<std::vector<std::string>> lines = {{"STACK", "WIDTH", "ROWS/PARTITION",
                                                  "SIZE/PARTITION", "MAX IDS", "MAX UNIQUE IDS",
                                                  "TABLES (row offset, rotation)"}};
  for (const v1::StackPlan& stack : plan.stacks()) {
    std::vector<std::string> tables;
    for (const v1::TablePlan& table : stack.tables()) {
      tables.push_back(
          absl::StrCat(table.name(), " (", table.row_offset(), ", ", table.shard_rotation(), ")"));
    }
    lines.push_back({stack.name(), absl::StrCat(stack.embedding_dim()),
                     absl::StrCat(stack.rows_per_partition()), Bytes(stack.bytes_per_partition()),
                     Limit(stack.max_ids_per_partition()),
                     Limit(stack.max_unique_ids_per_partition()), absl::StrJoin(tables, ", ")});
  }
  PrintColumns(lines, out);
}

void PrintFeatures(const v1::ModelPlan& plan, std::ostream& out) {
  std::vector<std::vector<std::string>> lines = {
      {"FEATURE", "TABLE", "STACK", "BATCH SIZE", "ROW OFFSET", "COL OFFSET", "COL SHIFT"}};
  for (const v1::StackPlan& stack : plan.stacks()) {
    for (const v1::FeaturePlan& feature : stack.features()) {
      lines.push_back({feature.name(), feature.table(), stack.name(),
                       absl::StrCat(feature.batch_size()), absl::StrCat(feature.row_offset()),
                       absl::StrCat(feature.col_offset()), absl::StrCat(feature.col_shift())});
    }
  }
  PrintColumns(lines, out);
}

}  // namespace emberd::emberctl
