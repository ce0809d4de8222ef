// CompleteModel: the checks that involve more than one field, and the defaults that depend on other
// fields.
#include <cmath>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "config/config.h"
#include "config/fields.h"
#include "config/optimizer_checks.h"
#include "config/stack_groups.h"

namespace emberd::config {
namespace {

// Names of tables or features: unique. `what` is the field of ModelConfig.
template <typename Items>
absl::Status CheckList(const Items& items, absl::string_view what) {
  if (items.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": empty; at least one is needed"));
  }
  absl::flat_hash_map<std::string, int> first;
  for (int i = 0; i < items.size(); ++i) {
    const auto [entry, inserted] = first.emplace(items[i].name(), i);
    if (inserted) continue;
    return NotAllowed(
        FieldPath(FieldPath("", what, i), "name"), QuotedText(items[i].name()),
        absl::StrCat("unique; it is also the name of ", FieldPath("", what, entry->second)));
  }
  return absl::OkStatus();
}

// lower and upper bound of a message that has both. The difference must be a finite float: formulas
// divide by it.
template <typename Bounds>
absl::Status CheckBounds(const Bounds& bounds, const std::string& path, bool may_be_equal) {
  if (bounds.lower() > bounds.upper() || (bounds.lower() == bounds.upper() && !may_be_equal)) {
    return NotAllowed(FieldPath(path, "lower"), absl::StrCat(bounds.lower()),
                      absl::StrCat(may_be_equal ? "<=" : "<", " upper = ", bounds.upper()));
  }
  if (std::isfinite(bounds.upper() - bounds.lower())) return absl::OkStatus();
  return NotAllowed(FieldPath(path, "upper"), absl::StrCat(bounds.upper()),
                    "less than 3.4e38 above lower");
}

absl::Status CheckTable(const v1::TableConfig& table, const std::string& path) {
  absl::Status status = CheckOptimizer(table.optimizer(), FieldPath(path, "optimizer"));
  if (status.ok() && table.has_quantization()) {
    status = CheckBounds(table.quantization(), FieldPath(path, "quantization"), false);
  }
  if (status.ok() && table.update_rounding() == v1::STOCHASTIC &&
      table.storage_dtype() != v1::BFLOAT16 && table.storage_dtype() != v1::FLOAT16) {
    status = NotAllowed(FieldPath(path, "update_rounding"), "STOCHASTIC",
                        "NEAREST for a storage_dtype of FLOAT32");
  }
  if (status.ok() && table.initializer().has_uniform()) {
    status =
        CheckBounds(table.initializer().uniform(), FieldPath(path, "initializer.uniform"), true);
  }
  return status;
}

// Every feature names a table that exists, and every table is named by a feature.
absl::Status CheckReferences(const v1::ModelConfig& model) {
  absl::flat_hash_set<std::string> tables;
  for (const v1::TableConfig& table : model.tables()) tables.insert(table.name());
  absl::flat_hash_set<std::string> used;
  for (int i = 0; i < model.features_size(); ++i) {
    const std::string& table = model.features(i).table();
    if (!tables.contains(table)) {
      return NotAllowed(FieldPath(FieldPath("", "features", i), "table"), QuotedText(table),
                        "the name of a table");
    }
    used.insert(table);
  }
  for (int i = 0; i < model.tables_size(); ++i) {
    if (used.contains(model.tables(i).name())) continue;
    return NotAllowed(FieldPath(FieldPath("", "tables", i), "name"),
                      QuotedText(model.tables(i).name()), "used by at least one feature");
  }
  return absl::OkStatus();
}

absl::Status CheckModel(const v1::ModelConfig& model) {
  absl::Status status = CheckFields(model);
  if (status.ok()) status = CheckList(model.tables(), "tables");
  if (status.ok()) status = CheckList(model.features(), "features");
  for (int i = 0; status.ok() && i < model.tables_size(); ++i) {
    status = CheckTable(model.tables(i), FieldPath("", "tables", i));
  }
  if (status.ok()) status = CheckReferences(model);
  if (status.ok()) status = CheckOptimizer(model.optimizer(), "optimizer");
  return status;
}

void CompleteTable(const v1::OptimizerConfig& model_optimizer, v1::TableConfig* table) {
  if (!table->has_optimizer()) *table->mutable_optimizer() = model_optimizer;
  CompleteOptimizer(table->mutable_optimizer());
  v1::InitializerConfig& initializer = *table->mutable_initializer();
  if (initializer.kind_case() == v1::InitializerConfig::KIND_NOT_SET) {
    initializer.mutable_truncated_normal()->set_stddev(
        static_cast<float>(1 / std::sqrt(static_cast<double>(table->embedding_dim()))));
  }
}

}  // namespace

absl::Status CompleteModel(v1::ModelConfig* model) {
  absl::Status status = CheckModel(*model);
  if (!status.ok()) return status;
  v1::ModelConfig complete = *model;
  CompleteOptimizer(complete.mutable_optimizer());
  for (v1::TableConfig& table : *complete.mutable_tables()) {
    CompleteTable(complete.optimizer(), &table);
  }
  complete.mutable_plan();
  FillFields(&complete);
  // Groups compare complete optimizers, so that a default and the same value written out are equal.
  status = CompleteGroups(&complete);
  if (status.ok()) *model = std::move(complete);
  return status;
}

}  // namespace emberd::config
