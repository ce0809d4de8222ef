#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "preprocess/plan/plan.h"
#include "preprocess/testing/numberings.h"
#include "tests/golden/jax_case_kinds.h"

namespace emberd::preprocess {
namespace {

using nlohmann::json;

// Stacked tables are written out up to this many cells.
constexpr int64_t kMaxCells = 1 << 20;

absl::Status SetOptimizer(const std::string& text, v1::OptimizerConfig* optimizer) {
  const size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  float learning_rate = 0;
  if (colon != std::string::npos) {
    if (!absl::SimpleAtof(text.substr(colon + 1), &learning_rate)) {
      return absl::InvalidArgumentError(
          absl::StrCat("optimizer '", text, "' has no learning rate"));
    }
    optimizer->set_learning_rate(learning_rate);
  }
  const auto* field = v1::OptimizerConfig::descriptor()->FindFieldByName(kind);
  if (field == nullptr || field->containing_oneof() == nullptr ||
      field->containing_oneof()->name() != "kind") {
    return absl::InvalidArgumentError(absl::StrCat("optimizer '", kind, "' is not known"));
  }
  optimizer->GetReflection()->MutableMessage(optimizer, field);
  return absl::OkStatus();
}

absl::Status CheckRange(absl::string_view name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": ", value, " is not allowed; it must be ", low, " to ", high));
}

// A recorded case holds no more than JAX accepts; these bounds keep whatever else from harm.
absl::Status CheckSizes(const json& input) {
  absl::Status status = CheckRange(
      "global_device_count", input.at("global_device_count").get<int64_t>(), 1, kMaxPartitions);
  status.Update(CheckRange("num_sc_per_device", input.at("num_sc_per_device").get<int64_t>(), 1,
                           kMaxPartitions));
  for (const json& table : input.at("tables")) {
    status.Update(CheckRange("vocab", table.at("vocab").get<int64_t>(), 1, int64_t{1} << 40));
    status.Update(CheckRange("dim", table.at("dim").get<int64_t>(), 1, 8192));
  }
  for (const json& feature : input.at("features")) {
    status.Update(CheckRange("global_batch", feature.at("global_batch").get<int64_t>(), 0,
                             std::numeric_limits<int32_t>::max()));
  }
  return status;
}

absl::StatusOr<v1::ModelConfig> ModelOf(const json& input) {
  if (absl::Status status = CheckSizes(input); !status.ok()) return status;
  v1::ModelConfig model;
  for (const json& table : input.at("tables")) {
    v1::TableConfig* config = model.add_tables();
    config->set_name(table.at("name").get<std::string>());
    config->set_vocabulary_size(table.at("vocab").get<int64_t>());
    config->set_embedding_dim(table.at("dim").get<int32_t>());
    config->set_combiner(CombinerOf(table.at("combiner").get<std::string>()));
    config->set_max_ids_per_partition(table.value("max_ids_per_partition", 0));
    config->set_max_unique_ids_per_partition(table.value("max_unique_ids_per_partition", 0));
    absl::Status status =
        SetOptimizer(table.at("optimizer").get<std::string>(), config->mutable_optimizer());
    if (!status.ok()) return status;
  }
  for (const json& feature : input.at("features")) {
    v1::FeatureConfig* config = model.add_features();
    config->set_name(feature.at("name").get<std::string>());
    config->set_table(feature.at("table").get<std::string>());
    config->set_batch_size(feature.at("global_batch").get<int64_t>());
  }
  v1::PlanConfig* plan = model.mutable_plan();
  plan->set_rules(v1::JAX);
  plan->set_auto_stack(input.at("groups").is_null());
  plan->set_short_stack_names(input.value("use_short_stack_names", true));
  const json& rotation = input.at("rotation");
  plan->set_rotation(rotation.is_null() ? input.at("num_sc_per_device").get<int32_t>()
                                        : rotation.get<int32_t>());
  const json& limit = input.at("activation_mem_bytes_limit");
  if (!limit.is_null()) plan->set_activation_bytes_limit(limit.get<int64_t>());
  if (!input.at("groups").is_null()) {
    for (const json& group : input.at("groups")) {
      v1::StackGroup* config = plan->add_groups();
      for (const json& table : group) config->add_tables(table.get<std::string>());
    }
  }
  return model;
}

RowPlacement PlacementOf(const Plan& plan, const TablePlan& table) {
  return {plan.topology.partitions(), table.shard_rotation, table.row_offset};
}

// Rank of a table in the alphabet, which the filling rule of the cases uses.
int Rank(const v1::ModelConfig& model, const std::string& name) {
  int rank = 0;
  for (const auto& table : model.tables()) rank += table.name() < name;
  return rank;
}

// The stack with cell (row r, column c) of the k-th table = 100000 * k + r * dim + c and -1 as
// padding, by partition; checks on the way that every row is found again.
json StackedCells(const v1::ModelConfig& model, const Plan& plan, const StackPlan& stack,
                  bool* roundtrip_ok) {
  const int64_t partitions = plan.topology.partitions();
  std::vector<std::vector<std::vector<int64_t>>> cells(
      partitions, std::vector<std::vector<int64_t>>(stack.rows_per_partition,
                                                    std::vector<int64_t>(stack.embedding_dim, -1)));
  for (const TablePlan& table : stack.tables) {
    const RowPlacement placement = PlacementOf(plan, table);
    const int64_t base = int64_t{100000} * Rank(model, table.name);
    for (int64_t id = 0; id < table.vocabulary_size; ++id) {
      const int64_t partition = placement.Partition(id);
      const int64_t row = placement.LocalRow(id);
      for (int c = 0; c < table.embedding_dim; ++c) {
        cells[partition][row][c] = base + id * table.embedding_dim + c;
      }
      *roundtrip_ok = *roundtrip_ok && TableRow(placement, partition, row) == id;
    }
  }
  return cells;
}

void AddPlacedRows(const v1::ModelConfig& model, const Plan& plan, json* result) {
  json stacked = json::object();
  json physical = json::object();
  bool roundtrip_ok = true;
  for (const StackPlan& stack : plan.stacks) {
    stacked[stack.name] = StackedCells(model, plan, stack, &roundtrip_ok);
    for (const TablePlan& table : stack.tables) {
      const RowPlacement placement = PlacementOf(plan, table);
      json rows = json::array();
      for (int64_t id = 0; id < table.vocabulary_size; ++id) {
        rows.push_back(PhysicalRow(placement, id, stack.rows_per_partition));
      }
      physical[table.name] = std::move(rows);
    }
  }
  (*result)["stacked"] = std::move(stacked);
  (*result)["physical_rows"] = std::move(physical);
  (*result)["roundtrip_ok"] = roundtrip_ok;
}

}  // namespace

absl::StatusOr<json> JaxStackingCase(const json& input) {
  const absl::StatusOr<v1::ModelConfig> model = ModelOf(input);
  if (!model.ok()) return model.status();
  const Topology topology = {input.at("global_device_count").get<int>(),
                             input.at("num_sc_per_device").get<int>()};
  const absl::StatusOr<Plan> plan = MakePlan(*model, topology);
  if (!plan.ok()) return plan.status();
  json tables = json::object(), stacks = json::object(), features = json::array();
  int64_t cells = 0;
  for (const StackPlan& stack : plan->stacks) {
    const int64_t rows = stack.rows_per_partition * topology.partitions();
    cells += rows * stack.embedding_dim;
    int64_t samples = 0;
    for (const FeaturePlan& feature : stack.features) samples += feature.batch_size;
    const json& first = input.at("tables").at(stack.tables.front().table);
    json& out = stacks[stack.name];
    out = {{"stack_vocab_size", rows},
           {"stack_embedding_dim", stack.embedding_dim},
           {"total_sample_count", samples},
           {"combiner", first.at("combiner")}};
    if (stack.limits.ids > 0) out["max_ids_per_partition"] = stack.limits.ids;
    if (stack.limits.unique > 0) out["max_unique_ids_per_partition"] = stack.limits.unique;
    for (const TablePlan& table : stack.tables) {
      tables[table.name] = {{"vocab", table.vocabulary_size},
                            {"dim", table.embedding_dim},
                            {"combiner", input.at("tables").at(table.table).at("combiner")},
                            {"stack_name", stack.name},
                            {"padded_vocab_size", table.padded_vocabulary_size},
                            {"padded_embedding_dim", stack.embedding_dim},
                            {"row_offset_in_shard", table.row_offset},
                            {"shard_rotation", table.shard_rotation}};
    }
  }
  for (const auto& [stack, position] : plan->feature_at) {
    const FeaturePlan& feature = plan->stacks[stack].features[position];
    features.push_back({{"name", feature.name},
                        {"table", plan->stacks[stack].tables[feature.table_in_stack].name},
                        {"global_batch", feature.batch_size},
                        {"row_offset", feature.row_offset},
                        {"col_offset", feature.col_offset},
                        {"col_shift", feature.col_shift}});
  }
  json result = {{"tables", tables}, {"stacks", stacks}, {"features", features}};
  if (cells <= kMaxCells) AddPlacedRows(*model, *plan, &result);
  return result;
}

}  // namespace emberd::preprocess
