#include <string>
#include <utility>
#include <vector>

#include <google/protobuf/text_format.h>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/plan_view.h"
#include "client/emberctl/verbs/checkpoint.h"
#include "client/emberctl/verbs/verb.h"
#include "config/config.h"
#include "config/shared_tables.h"

namespace emberd::emberctl {
namespace {

struct DeclareOptions {
  std::string path;
  std::string restore_from;  // a checkpoint; empty: none
};

absl::Status Declare(Session& session, const DeclareOptions& options) {
  v1::DeclareModelRequest request;
  ASSIGN_OR_RETURN(*request.mutable_config(), config::LoadModel(options.path));
  const v1::ModelConfig& config = request.config();
  request.set_restore_from(options.restore_from);
  // Rows are read before the answer comes.
  const absl::Duration deadline = options.restore_from.empty() ? absl::ZeroDuration() : kLong;
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::DeclareModelResponse>(request, deadline));
  if (session.json) return PrintJson(response, session.out);
  session.out << config.name() << ": "
              << (response.unfilled()  ? "waits for the rows that a client is to assign"
                  : response.created() ? "created"
                                       : "exists already")
              << ", id " << HexId(response.model_id()) << ", "
              << Counted(config.tables_size(), "table") << " in "
              << Counted(response.plan().stacks_size(), "stack") << ", "
              << Bytes(response.plan().table_bytes()) << "\n";
  PrintWarnings(response.plan(), session.out);
  const absl::StatusOr<v1::GetStatusResponse> cluster = session.GetStatus();
  if (!cluster.ok()) return absl::OkStatus();  // the model is there all the same
  const std::string missing = MissingMemory(*cluster);
  if (!missing.empty()) session.out << "warning: " << missing << "\n";
  return absl::OkStatus();
}

// Of a model that was dropped. A cluster without storage has no checkpoints.
void PrintWhatStays(Session& session, const std::string& name) {
  v1::ListCheckpointsRequest request;
  request.set_model(name);
  const auto list = session.Call<v1::ListCheckpointsResponse>(request);
  if (!list.ok() || list->checkpoints().empty()) return;
  session.out << "what stays of it (see `emberctl checkpoint list " << name
              << "`): " << StoredText(*list) << "; `emberctl checkpoint prune " << name
              << "` deletes the latter\n";
}

absl::Status DropModel(Session& session, const v1::DropModelRequest& request) {
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::DropModelResponse>(request));
  if (session.json) return PrintJson(response, session.out);
  session.out << "model '" << request.name()
              << (response.dropped() ? "' dropped\n" : "' is not declared: nothing to drop\n");
  PrintWhatStays(session, request.name());
  return absl::OkStatus();
}

absl::Status ResetModel(Session& session, const v1::ResetModelRequest& request) {
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::ResetModelResponse>(request));
  return session.Answer(response, absl::StrCat("model '", request.name(),
                                               "' has initial rows again on all shards, with "
                                               "history ",
                                               HexId(response.history())));
}

// What `rows` and `export` take as --slot; nothing where no optimizer has any.
void PrintSlots(const v1::DescribeModelResponse& model, std::ostream& out) {
  if (model.slots().empty()) return;
  Table lines = {{"TABLE", "SLOT", "SHAPE"}};
  for (const v1::SlotShape& slot : model.slots()) {
    lines.push_back({slot.table(), slot.slot(), absl::StrJoin(slot.shape(), " x ")});
  }
  out << "\n";
  PrintColumns(lines, out);
}

// The table of a model's tables: its headings, and a line for each that the plan has placed.
CellLine TableHeadings() {
  return {"MODEL",     "TABLE", "VOCABULARY", "DIM",      "COMBINER",
          "OPTIMIZER", "SLOTS", "STACK",      "SHARED AS"};
}

// The stack of a table; null if the plan does not hold it.
const v1::StackPlan* StackOf(const v1::DescribeModelResponse& model, const v1::TableConfig& table) {
  const std::string& stored = config::StoredTable(model.config(), table).name();
  for (const v1::StackPlan& stack : model.plan().stacks()) {
    for (const v1::TablePlan& placed : stack.tables()) {
      if (placed.name() == stored) return &stack;
    }
  }
  return nullptr;
}

void AppendTableLines(const v1::DescribeModelResponse& model, Table* lines) {
  for (const v1::TableConfig& table : model.config().tables()) {
    const v1::StackPlan* stack = StackOf(model, table);
    if (stack == nullptr) continue;
    lines->push_back(
        {model.config().name(), table.name(), table.vocabulary_size(), table.embedding_dim(),
         v1::Combiner_Name(table.combiner()), stack->optimizer(),
         stack->slots().empty() ? "-" : absl::StrJoin(stack->slots(), ","), stack->name(),
         table.has_resource() ? config::ResourceText(table.resource()) : "-"});
  }
}

// One line per table: its optimizer and its initial values, with all parameters.
void PrintTraining(const v1::ModelConfig& model, std::ostream& out) {
  google::protobuf::TextFormat::Printer printer;
  printer.SetSingleLineMode(true);
  const auto text = [&printer](const google::protobuf::Message& message) {
    std::string line;
    printer.PrintToString(message, &line);
    absl::StripAsciiWhitespace(&line);
    return line;
  };
  Table lines = {{"TABLE", "INITIALIZER", "OPTIMIZER"}};
  for (const v1::TableConfig& table : model.tables()) {
    lines.push_back({table.name(), text(table.initializer()), text(table.optimizer())});
  }
  PrintColumns(lines, out);
}

absl::Status DescribeModel(Session& session, const std::string& model) {
  ASSIGN_OR_RETURN(v1::DescribeModelResponse found, session.DescribeModel(model));
  if (session.json) return PrintJson(found, session.out);
  const v1::ModelPlan& plan = found.plan();
  session.out << found.config().name() << ": id " << HexId(found.model_id()) << ", "
              << Bytes(plan.table_bytes()) << " on " << SizeText(plan) << "\n";
  if (!found.serves().empty()) session.out << "serves checkpoint " << found.serves() << "\n";
  session.out << "\n";
  Table lines = {TableHeadings()};
  AppendTableLines(found, &lines);
  PrintColumns(lines, session.out);
  session.out << "\n";
  PrintTraining(found.config(), session.out);
  PrintSlots(found, session.out);
  session.out << "\n";
  PrintStacks(plan, session.out);
  session.out << "\n";
  PrintFeatures(plan, session.out);
  return absl::OkStatus();
}

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
    const v1::StackPlan* stack = StackOf(model, table);
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
  Table lines = {TableHeadings()};
  Json tables = Json::array();
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(v1::DescribeModelResponse found, session.DescribeModel(name));
    AppendTableLines(found, &lines);
    AppendTables(found, &tables);
  }
  if (session.json) return PrintJson(tables, session.out);
  PrintColumns(lines, session.out);
  return absl::OkStatus();
}

absl::Status ServeCheckpoint(Session& session, const v1::ServeCheckpointRequest& request) {
  ASSIGN_OR_RETURN(const v1::CheckpointProgress result, RunCall(session, request));
  const v1::CheckpointInfo& info = result.checkpoint();
  const std::string& name = request.serve_as().empty() ? request.model() : request.serve_as();
  return session.Answer(
      result, absl::StrCat("model '", name, "' serves checkpoint '", info.name(), "' of model '",
                           info.model(), "' on all shards, with id ", HexId(result.model_id()),
                           ": ", Work(result)));
}

absl::Status DropGroup(Session& session, const v1::DropGroupRequest& request) {
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::DropGroupResponse>(request));
  return session.Answer(
      response, absl::StrCat("group '", request.group(), "' of model '", request.model(),
                             response.dropped() ? "' dropped" : "' is not known: nothing to drop"));
}

}  // namespace

void AddDeclare(CLI::App& app, Session& session) {
  auto [declare, options] = AddVerb(app, session, "declare",
                                    "Create the tables of a model; nothing happens if they exist",
                                    "emberctl declare model.textproto", Declare);
  declare->add_option("FILE", options->path, "ModelConfig as text proto or JSON")->required();
  declare
      ->add_option(
          "--restore-from", options->restore_from,
          "If the model does not exist, begin with the rows of this checkpoint, or with those "
          "of the newest one: newest")
      ->type_name("NAME");
}

void AddModel(CLI::App& app, Session& session) {
  CLI::App& model =
      AddGroupOfVerbs(app, "model", "Drop or reset a model", "emberctl model reset my_model");
  auto [drop, dropped] =
      AddVerb(model, session, "drop",
              "Remove a model and its rows from all shards; an undeclared model is not an error",
              "emberctl model drop my_model", DropModel);
  drop->add_option("MODEL", *dropped->mutable_name(), "Name of the model")->required();
  auto [reset, renewed] = AddVerb(
      model, session, "reset",
      "Discard all rows of a model: all shards get initial rows again. This ends DATA_LOSS after a "
      "shard has lost its rows",
      "emberctl model reset my_model", ResetModel);
  reset->add_option("MODEL", *renewed->mutable_name(), "Name of the model")->required();
}

void AddDescribe(CLI::App& app, Session& session) {
  auto [describe, model] = AddVerb(
      app, session, "describe",
      "A declared model: its tables, optimizers, slots, initializers, stacks and features; for its "
      "memory see plan",
      "emberctl describe my_model", DescribeModel);
  describe->add_option("MODEL", *model, "Name of the model")->required();
}

void AddTables(CLI::App& app, Session& session) {
  auto [tables, model] = AddVerb(app, session, "tables", "List the tables of a model, or of all",
                                 "emberctl tables my_model", ListTables);
  tables->add_option("MODEL", *model, "Name of the model");
}

void AddServe(CLI::App& app, Session& session) {
  auto [serve, request] = AddVerb(
      app, session, "serve",
      "Serve the weights of a checkpoint for lookups only. What is served under the name now "
      "stays in service until the new rows are loaded, so that no lookup fails",
      "emberctl serve my_model step-1000 --as my_model-live --storage bfloat16", ServeCheckpoint);
  serve->add_option("MODEL", *request->mutable_model(), "Name of the model of the checkpoint")
      ->required();
  serve->add_option("NAME", *request->mutable_name(),
                    "Name of the checkpoint; default: the newest");
  serve
      ->add_option("--as", *request->mutable_serve_as(),
                   "Name of the model that serves it; default: MODEL, which must then not be "
                   "trained on this cluster")
      ->type_name("MODEL");
  const auto set_storage = [to = request](const std::string& storage) {
    v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
    v1::DataType_Parse(absl::AsciiStrToUpper(storage), &dtype);
    to->set_storage_dtype(dtype);
  };
  serve
      ->add_option_function<std::string>(
          "--storage", set_storage,
          "How rows are stored; default: as those served under the name now, or else as in the "
          "checkpoint")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16"}));
}

void AddGroup(CLI::App& app, Session& session) {
  CLI::App& group = AddGroupOfVerbs(app, "group", "Drop a group of trainers",
                                    "emberctl group drop my_model run-7");
  auto [drop, request] = AddVerb(
      group, session, "drop",
      "Forget a group whose run is over: the next run under its name begins at its first step. An "
      "unknown group is not an error; one with active ranks is refused",
      "emberctl group drop my_model run-7", DropGroup);
  drop->add_option("MODEL", *request->mutable_model(), "Name of the model")->required();
  drop->add_option("GROUP", *request->mutable_group(), "Name of the group")->required();
}

}  // namespace emberd::emberctl
