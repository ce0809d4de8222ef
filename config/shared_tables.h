// Tables that have their rows in common, in one model and in several: TableConfig.resource with
// enable_variable_deduplication.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "emberd/v1/model.pb.h"

namespace emberd::config {

// What names a resource in errors and as a key: "container/name", or "name" without a container.
std::string ResourceText(const v1::TableResource& resource);

// Whether the rows of a table, or of any table, of a complete model are shared. There, a table has
// a resource only with the flag.
inline bool IsShared(const v1::TableConfig& table) { return table.has_resource(); }
bool HasSharedTables(const v1::ModelConfig& model);

// Options that shared rows cannot have. For CompleteModel, which has checked fields and references.
absl::Status CheckResources(const v1::ModelConfig& model);
// Whether tables of one resource agree in what makes their rows. The model is complete.
absl::Status CheckViews(const v1::ModelConfig& model);

// The table of a model that has the rows of one of its tables: the first of the same resource, or
// the table itself.
const v1::TableConfig& StoredTable(const v1::ModelConfig& model, const v1::TableConfig& table);
// By name, which a complete model may lack.
const std::string& StoredName(const v1::ModelConfig& model, const std::string& table);
// What initial values of a table depend on in the place of its name.
const std::string& SeedName(const v1::ModelConfig& model, const v1::TableConfig& table);
// Gives tables without a seed_name, of resources that `held` has, what the rows there began with.
void AdoptSeedNames(const v1::ModelConfig& held, v1::ModelConfig* model);

// Whether a new model may share the rows of one that is there; both are complete. ALREADY_EXISTS
// names the resource, and the first field in which tables with it differ.
absl::Status CheckSameShared(const v1::ModelConfig& holder, const v1::ModelConfig& requested);

// Whether new rows may take the place of those of a model. FAILED_PRECONDITION: `other` is another
// model, and holds a resource of it.
absl::Status CheckAlone(const v1::ModelConfig& other, const v1::ModelConfig& model);

// The first resource that both have, as text; empty: none.
std::string CommonResource(const v1::ModelConfig& a, const v1::ModelConfig& b);

}  // namespace emberd::config
