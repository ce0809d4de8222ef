#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/emberctl/commands.h"
#include "client/emberctl/output.h"
#include "client/emberctl/plan_output.h"
#include "config/config.h"

namespace emberd::emberctl {
namespace {

// Names of all models, or just `model` if it is not empty.
absl::StatusOr<std::vector<std::string>> ModelNames(Session& session, const std::string& model) {
  if (!model.empty()) return std::vector<std::string>{model};
  v1::GetStatusResponse response;
  absl::Status status = session.Call([&](const client::Coordinator& coordinator, auto* context) {
    return coordinator.admin->GetStatus(context, {}, &response);
  });
  if (!status.ok()) return status;
  std::vector<std::string> names;
  for (const v1::ModelStatus& known : response.models()) names.push_back(known.name());
  return names;
}

std::vector<std::string> TableHeadings() {
  return {"MODEL", "TABLE", "VOCABULARY", "DIM", "COMBINER", "OPTIMIZER", "SLOTS", "STACK"};
}

// The stack of a table; null if the plan does not hold it.
const v1::StackPlan* StackOf(const v1::ModelPlan& plan, const std::string& table) {
  for (const v1::StackPlan& stack : plan.stacks()) {
    for (const v1::TablePlan& placed : stack.tables()) {
      if (placed.name() == table) return &stack;
    }
  }
  return nullptr;
}

void AppendTables(const v1::DescribeModelResponse& model,
                  std::vector<std::vector<std::string>>* lines) {
  for (const v1::TableConfig& table : model.config().tables()) {
    const v1::StackPlan* stack = StackOf(model.plan(), table.name());
    if (stack == nullptr) continue;
    lines->push_back({model.config().name(), table.name(), absl::StrCat(table.vocabulary_size()),
                      absl::StrCat(table.embedding_dim()), v1::Combiner_Name(table.combiner()),
                      stack->optimizer(),
                      stack->slots().empty() ? "-" : absl::StrJoin(stack->slots(), ","),
                      stack->name()});
  }
}

void AppendTables(const v1::DescribeModelResponse& model, Json* tables) {
  for (const v1::TableConfig& table : model.config().tables()) {
    const v1::StackPlan* stack = StackOf(model.plan(), table.name());
    if (stack == nullptr) continue;
    tables->push_back(
        {{"model", model.config().name()},
         {"table", table.name()},
         {"vocabulary_size", table.vocabulary_size()},
         {"embedding_dim", table.embedding_dim()},
         {"combiner", v1::Combiner_Name(table.combiner())},
         {"optimizer", stack->optimizer()},
         {"slots", std::vector<std::string>(stack->slots().begin(), stack->slots().end())},
         {"stack", stack->name()}});
  }
}

}  // namespace

absl::StatusOr<v1::DescribeModelResponse> FetchModel(Session& session, const std::string& name) {
  v1::DescribeModelRequest request;
  request.set_name(name);
  v1::DescribeModelResponse response;
  absl::Status status = session.Call([&](const client::Coordinator& coordinator, auto* context) {
    return coordinator.embedding->DescribeModel(context, request, &response);
  });
  if (!status.ok()) return status;
  return response;
}

absl::Status ListTables(Session& session, const std::string& model) {
  absl::StatusOr<std::vector<std::string>> names = ModelNames(session, model);
  if (!names.ok()) return names.status();
  std::vector<std::vector<std::string>> lines = {TableHeadings()};
  Json tables = Json::array();
  for (const std::string& name : *names) {
    absl::StatusOr<v1::DescribeModelResponse> found = FetchModel(session, name);
    if (!found.ok()) return found.status();
    AppendTables(*found, &lines);
    AppendTables(*found, &tables);
  }
  if (session.json) {
    session.out << tables.dump(1) << "\n";
  } else {
    PrintColumns(lines, session.out);
  }
  return absl::OkStatus();
}

absl::Status Describe(Session& session, const std::string& model) {
  absl::StatusOr<v1::DescribeModelResponse> found = FetchModel(session, model);
  if (!found.ok()) return found.status();
  if (session.json) {
    PrintJson(*found, session.out);
    return absl::OkStatus();
  }
  const v1::ModelPlan& plan = found->plan();
  session.out << found->config().name() << ": id " << absl::StrFormat("%016x", found->model_id())
              << ", " << Bytes(plan.table_bytes()) << " on " << plan.shards() << " shards x "
              << plan.sparsecores_per_shard() << " SparseCores = " << plan.partitions()
              << " partitions\n\n";
  std::vector<std::vector<std::string>> lines = {TableHeadings()};
  AppendTables(*found, &lines);
  PrintColumns(lines, session.out);
  session.out << "\n";
  PrintStacks(plan, session.out);
  session.out << "\n";
  PrintFeatures(plan, session.out);
  return absl::OkStatus();
}

absl::Status Declare(Session& session, const std::string& path) {
  absl::StatusOr<v1::ModelConfig> config = config::LoadModel(path);
  if (!config.ok()) return config.status();
  v1::DeclareModelRequest request;
  *request.mutable_config() = *config;
  v1::DeclareModelResponse response;
  absl::Status status = session.Call([&](const client::Coordinator& coordinator, auto* context) {
    return coordinator.embedding->DeclareModel(context, request, &response);
  });
  if (!status.ok()) return status;
  if (session.json) {
    PrintJson(response, session.out);
    return absl::OkStatus();
  }
  session.out << config->name() << ": " << (response.created() ? "created" : "was there already")
              << ", id " << absl::StrFormat("%016x", response.model_id()) << ", "
              << config->tables_size() << " tables in " << response.plan().stacks_size()
              << " stacks, " << Bytes(response.plan().table_bytes()) << "\n";
  return absl::OkStatus();
}

}  // namespace emberd::emberctl
