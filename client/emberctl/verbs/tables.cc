#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/plan_view.h"
#include "client/emberctl/verbs/verb.h"
#include "config/shared_tables.h"

namespace emberd::emberctl {
namespace {

// Names of all models, or just `model` if it is not empty.
absl::StatusOr<std::vector<std::string>> ModelNames(Session& session, const std::string& model) {
  if (!model.empty()) return std::vector<std::string>{model};
  ASSIGN_OR_RETURN(const v1::GetStatusResponse response, session.GetStatus());
  std::vector<std::string> names;
  for (const v1::ModelStatus& known : response.models()) names.push_back(known.name());
  return names;
}

void AppendTables(const v1::DescribeModelResponse& model, Json* tables) {
  for (const v1::TableConfig& table : model.config().tables()) {
    const v1::StackPlan* stack = StackOf(model.plan(), table.name());
    if (stack == nullptr) continue;
    Json entry = {{"model", model.config().name()},
                  {"table", table.name()},
                  {"vocabulary_size", table.vocabulary_size()},
                  {"embedding_dim", table.embedding_dim()},
                  {"combiner", v1::Combiner_Name(table.combiner())},
                  {"optimizer", stack->optimizer()},
                  {"slots", std::vector<std::string>(stack->slots().begin(), stack->slots().end())},
                  {"stack", stack->name()}};
    if (table.has_resource()) entry["resource"] = config::ResourceText(table.resource());
    tables->push_back(std::move(entry));
  }
}

absl::Status ListTables(Session& session, const std::string& model) {
  ASSIGN_OR_RETURN(std::vector<std::string> names, ModelNames(session, model));
  std::vector<std::vector<std::string>> lines = {TableHeadings()};
  Json tables = Json::array();
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(v1::DescribeModelResponse found, session.DescribeModel(name));
    AppendTableLines(found, &lines);
    AppendTables(found, &tables);
  }
  if (session.json) {
    session.out << tables.dump(1) << "\n";
  } else {
    PrintColumns(lines, session.out);
  }
  return absl::OkStatus();
}

}  // namespace

void AddTables(CLI::App& app, Session& session, Command& command) {
  auto model = std::make_shared<std::string>();
  CLI::App* tables = app.add_subcommand("tables", "List the tables of a model, or of all");
  tables->add_option("MODEL", *model, "Name of the model");
  SetExample(tables, "emberctl tables my_model");
  tables->callback([model, &session, &command] {
    command = [model, &session] { return ListTables(session, *model); };
  });
}

}  // namespace emberd::emberctl
