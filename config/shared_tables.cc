#include "config/shared_tables.h"

#include <vector>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "config/config.h"
#include "config/fields.h"

namespace emberd::config {
namespace {

absl::Status CheckContainer(const v1::TableResource& resource, const std::string& path) {
  const std::string& container = resource.container();
  if (container.empty() || (container.size() <= kMaxNameLength && HasNameCharacters(container))) {
    return absl::OkStatus();
  }
  return NotAllowed(FieldPath(path, "container"), QuotedText(container),
                    "0 to 128 characters of [A-Za-z0-9_.-]");
}

const v1::TableConfig* FindResource(const v1::ModelConfig& model, const std::string& text) {
  for (const v1::TableConfig& table : model.tables()) {
    if (IsShared(table) && ResourceText(table.resource()) == text) return &table;
  }
  return nullptr;
}

// By resource: the first of its tables. For those who ask for many.
using FirstTables = absl::flat_hash_map<std::string, const v1::TableConfig*>;

FirstTables FirstTablesOf(const v1::ModelConfig& model) {
  FirstTables first;
  for (const v1::TableConfig& table : model.tables()) {
    if (IsShared(table)) first.try_emplace(ResourceText(table.resource()), &table);
  }
  return first;
}

const v1::TableConfig* Find(const FirstTables& first, const v1::TableConfig& table) {
  const auto found = first.find(ResourceText(table.resource()));
  return found == first.end() ? nullptr : found->second;
}

const std::string& SeedNameOf(const v1::TableConfig& table, const v1::TableConfig& stored) {
  if (table.has_seed_name()) return table.seed_name();
  return stored.has_seed_name() ? stored.seed_name() : stored.name();
}

// What two models must agree on, as a model of its own. `stored` has the rows of the table.
v1::ModelConfig WhatRowsDependOn(const v1::ModelConfig& model, const v1::TableConfig& table,
                                 const v1::TableConfig& stored) {
  v1::ModelConfig part;
  part.set_seed(model.seed());
  v1::TableConfig* const copy = part.add_tables();
  *copy = table;
  copy->clear_name();
  copy->set_seed_name(SeedNameOf(table, stored));
  copy->clear_combiner();
  copy->clear_max_ids_per_partition();
  copy->clear_max_unique_ids_per_partition();
  copy->clear_resource();
  copy->clear_residency();
  return part;
}

// Options of tables with a resource that only rows of a model's own can have.
std::vector<std::string> ContradictingFlags(const v1::ModelConfig& model) {
  std::vector<std::string> flags;
  for (int i = 0; i < model.tables_size(); ++i) {
    if (!IsShared(model.tables(i))) continue;
    const std::string path = FieldPath("", "tables", i);
    if (model.tables(i).update_rounding() == v1::STOCHASTIC) {
      flags.push_back(absl::StrCat(FieldPath(path, "update_rounding"), " STOCHASTIC"));
    }
    if (model.tables(i).initializer().has_assigned()) {
      flags.push_back(absl::StrCat(FieldPath(path, "initializer"), " assigned"));
    }
  }
  for (int g = 0; g < model.plan().groups_size(); ++g) {
    const v1::StackGroup& group = model.plan().groups(g);
    for (int i = 0; i < group.tables_size(); ++i) {
      const auto table = absl::c_find_if(
          model.tables(), [&](const auto& t) { return t.name() == group.tables(i); });
      if (table == model.tables().end() || !IsShared(*table)) continue;
      flags.push_back(absl::StrCat(FieldPath(FieldPath("plan", "groups", g), "tables", i), " ",
                                   QuotedText(group.tables(i))));
    }
  }
  return flags;
}

}  // namespace

std::string ResourceText(const v1::TableResource& resource) {
  return resource.container().empty() ? resource.name()
                                      : absl::StrCat(resource.container(), "/", resource.name());
}

bool HasSharedTables(const v1::ModelConfig& model) {
  return absl::c_any_of(model.tables(), IsShared);
}

absl::Status CheckResources(const v1::ModelConfig& model) {
  for (int i = 0; i < model.tables_size(); ++i) {
    if (!model.tables(i).has_resource()) continue;
    RETURN_IF_ERROR(CheckContainer(model.tables(i).resource(),
                                   FieldPath(FieldPath("", "tables", i), "resource")));
  }
  if (!model.enable_variable_deduplication()) return absl::OkStatus();
  const std::vector<std::string> flags = ContradictingFlags(model);
  if (flags.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("The following flags are incompatible: ", absl::StrJoin(flags, ", "),
                   " and enable_variable_deduplication. Only enable one of the flags."));
}

absl::Status CheckViews(const v1::ModelConfig& model) {
  const FirstTables first = FirstTablesOf(model);
  for (int i = 0; i < model.tables_size(); ++i) {
    const v1::TableConfig& table = model.tables(i);
    if (!IsShared(table)) continue;
    const v1::TableConfig& stored = *Find(first, table);
    const std::string difference = FirstDifference(WhatRowsDependOn(model, stored, stored),
                                                   WhatRowsDependOn(model, table, stored),
                                                   absl::StrCat("of ", QuotedText(stored.name())),
                                                   absl::StrCat("of ", QuotedText(table.name())));
    if (difference.empty()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        FieldPath("", "tables", i), " ", QuotedText(table.name()), ": resource ",
        QuotedText(ResourceText(table.resource())), " is that of table ", QuotedText(stored.name()),
        ", too, and the tables must agree; first difference: ",
        absl::StripPrefix(difference, "tables[0].")));
  }
  return absl::OkStatus();
}

const v1::TableConfig& StoredTable(const v1::ModelConfig& model, const v1::TableConfig& table) {
  return IsShared(table) ? *FindResource(model, ResourceText(table.resource())) : table;
}

const std::string& StoredName(const v1::ModelConfig& model, const std::string& table) {
  const auto found =
      absl::c_find_if(model.tables(), [&](const auto& t) { return t.name() == table; });
  return found == model.tables().end() ? table : StoredTable(model, *found).name();
}

const std::string& SeedName(const v1::ModelConfig& model, const v1::TableConfig& table) {
  if (table.has_seed_name()) return table.seed_name();
  return SeedNameOf(table, StoredTable(model, table));
}

void AdoptSeedNames(const v1::ModelConfig& held, v1::ModelConfig* model) {
  const FirstTables first_held = FirstTablesOf(held), first = FirstTablesOf(*model);
  for (v1::TableConfig& table : *model->mutable_tables()) {
    if (!IsShared(table) || table.has_seed_name()) continue;
    const v1::TableConfig* const there = Find(first_held, table);
    if (there == nullptr) continue;
    const std::string& name = SeedNameOf(*there, *there);
    if (name != SeedNameOf(table, *Find(first, table))) table.set_seed_name(name);
  }
}

absl::Status CheckSameShared(const v1::ModelConfig& holder, const v1::ModelConfig& requested) {
  const FirstTables first_held = FirstTablesOf(holder), first = FirstTablesOf(requested);
  for (int i = 0; i < requested.tables_size(); ++i) {
    const v1::TableConfig& table = requested.tables(i);
    if (!IsShared(table)) continue;
    const std::string text = ResourceText(table.resource());
    const v1::TableConfig* const held = Find(first_held, table);
    if (held == nullptr) continue;
    const std::string difference =
        FirstDifference(WhatRowsDependOn(holder, *held, *held),
                        WhatRowsDependOn(requested, table, *Find(first, table)));
    if (difference.empty()) continue;
    return absl::AlreadyExistsError(absl::StrCat(
        FieldPath("", "tables", i), " ", QuotedText(table.name()), ": resource ", QuotedText(text),
        " is held by model '", holder.name(), "', and the tables must agree; first difference: ",
        absl::StripPrefix(difference, "tables[0].")));
  }
  return absl::OkStatus();
}

absl::Status CheckAlone(const v1::ModelConfig& other, const v1::ModelConfig& model) {
  const std::string resource = CommonResource(other, model);
  if (resource.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("model '", model.name(), "' shares resource ", QuotedText(resource),
                   " with model '", other.name(),
                   "', whose rows would change, too; this works when no other model holds the "
                   "resource: drop model '",
                   other.name(), "' first (`emberctl model drop ", other.name(), "`)"));
}

std::string CommonResource(const v1::ModelConfig& a, const v1::ModelConfig& b) {
  const FirstTables first = FirstTablesOf(a);
  for (const v1::TableConfig& table : b.tables()) {
    if (IsShared(table) && Find(first, table) != nullptr) return ResourceText(table.resource());
  }
  return "";
}

}  // namespace emberd::config
