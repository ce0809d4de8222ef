#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
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

absl::Status Declare(Session& session, const std::string& path, const std::string& restore_from) {
  ASSIGN_OR_RETURN(v1::ModelConfig config, config::LoadModel(path));
  v1::DeclareModelRequest request;
  *request.mutable_config() = config;
  request.set_restore_from(restore_from);
  // Rows are read before the answer comes.
  const absl::Duration deadline = restore_from.empty() ? absl::ZeroDuration() : absl::Hours(24);
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::DeclareModelResponse>(request, deadline));
  if (session.json) {
    PrintJson(response, session.out);
    return absl::OkStatus();
  }
  session.out << config.name() << ": " << (response.created() ? "created" : "exists already")
              << ", id " << HexId(response.model_id()) << ", "
              << Counted(config.tables_size(), "table") << " in "
              << Counted(response.plan().stacks_size(), "stack") << ", "
              << Bytes(response.plan().table_bytes()) << "\n";
  const absl::StatusOr<v1::GetStatusResponse> cluster = session.GetStatus();
  if (!cluster.ok()) return absl::OkStatus();  // the model is there all the same
  const std::string missing = MissingMemory(*cluster);
  if (!missing.empty()) session.out << "warning: " << missing << "\n";
  return absl::OkStatus();
}

}  // namespace

void AddDeclare(CLI::App& app, Session& session, Command& command) {
  auto path = std::make_shared<std::string>();
  CLI::App* declare =
      app.add_subcommand("declare", "Create the tables of a model; nothing happens if they exist");
  declare->add_option("FILE", *path, "ModelConfig as text proto or JSON")->required();
  auto restore_from = std::make_shared<std::string>();
  declare
      ->add_option(
          "--restore-from", *restore_from,
          "If the model does not exist, begin with the rows of this checkpoint, or with those "
          "of the newest one: newest")
      ->type_name("NAME");
  SetExample(declare, "emberctl declare model.textproto");
  declare->callback([path, restore_from, &session, &command] {
    command = [path, restore_from, &session] { return Declare(session, *path, *restore_from); };
  });
}

namespace {

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

absl::Status Drop(Session& session, const std::string& name) {
  v1::DropModelRequest request;
  request.set_name(name);
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::DropModelResponse>(request));
  if (session.json) {
    PrintJson(response, session.out);
  } else {
    session.out << "model '" << name
                << (response.dropped() ? "' dropped\n" : "' is not declared: nothing to drop\n");
    PrintWhatStays(session, name);
  }
  return absl::OkStatus();
}

absl::Status Reset(Session& session, const std::string& name) {
  v1::ResetModelRequest request;
  request.set_name(name);
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::ResetModelResponse>(request));
  if (session.json) {
    PrintJson(response, session.out);
  } else {
    session.out << "model '" << name << "' has initial rows again on all shards, with history "
                << absl::StrFormat("%016x", response.history()) << "\n";
  }
  return absl::OkStatus();
}

}  // namespace

void AddModel(CLI::App& app, Session& session, Command& command) {
  CLI::App* model = app.add_subcommand("model", "Drop or reset a model");
  model->require_subcommand(1);
  SetExample(model, "emberctl model reset my_model");
  const auto name = std::make_shared<std::string>();
  CLI::App* drop = model->add_subcommand(
      "drop", "Remove a model and its rows from all shards; an undeclared model is not an error");
  drop->add_option("MODEL", *name, "Name of the model")->required();
  SetExample(drop, "emberctl model drop my_model");
  drop->callback(
      [name, &session, &command] { command = [name, &session] { return Drop(session, *name); }; });
  CLI::App* reset = model->add_subcommand(
      "reset",
      "Discard all rows of a model: all shards get initial rows again. This ends DATA_LOSS after a "
      "shard has lost its rows");
  reset->add_option("MODEL", *name, "Name of the model")->required();
  SetExample(reset, "emberctl model reset my_model");
  reset->callback(
      [name, &session, &command] { command = [name, &session] { return Reset(session, *name); }; });
}

namespace {

// What `rows` and `export` take as --slot; nothing where no optimizer has any.
void PrintSlots(const v1::DescribeModelResponse& model, std::ostream& out) {
  if (model.slots().empty()) return;
  std::vector<std::vector<std::string>> lines = {{"TABLE", "SLOT", "SHAPE"}};
  for (const v1::SlotShape& slot : model.slots()) {
    lines.push_back({slot.table(), slot.slot(), absl::StrJoin(slot.shape(), " x ")});
  }
  out << "\n";
  PrintColumns(lines, out);
}

absl::Status Describe(Session& session, const std::string& model) {
  ASSIGN_OR_RETURN(v1::DescribeModelResponse found, session.DescribeModel(model));
  if (session.json) {
    PrintJson(found, session.out);
    return absl::OkStatus();
  }
  const v1::ModelPlan& plan = found.plan();
  session.out << found.config().name() << ": id " << HexId(found.model_id()) << ", "
              << Bytes(plan.table_bytes()) << " on " << Counted(plan.shards(), "shard") << " x "
              << Counted(plan.sparsecores_per_shard(), "SparseCore") << " = "
              << Counted(plan.partitions(), "partition") << "\n";
  if (!found.serves().empty()) session.out << "serves checkpoint " << found.serves() << "\n";
  session.out << "\n";
  std::vector<std::vector<std::string>> lines = {TableHeadings()};
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

}  // namespace

void AddDescribe(CLI::App& app, Session& session, Command& command) {
  auto model = std::make_shared<std::string>();
  CLI::App* describe = app.add_subcommand(
      "describe",
      "A declared model: its tables, optimizers, slots, initializers, stacks and features; for its "
      "memory see plan");
  describe->add_option("MODEL", *model, "Name of the model")->required();
  SetExample(describe, "emberctl describe my_model");
  describe->callback([model, &session, &command] {
    command = [model, &session] { return Describe(session, *model); };
  });
}

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

namespace {

absl::Status Serve(Session& session, const v1::ServeCheckpointRequest& request) {
  ASSIGN_OR_RETURN(const v1::CheckpointProgress result, RunCall(session, request));
  const v1::CheckpointInfo& info = result.checkpoint();
  const std::string& name = request.serve_as().empty() ? request.model() : request.serve_as();
  return PrintDone(session, result,
                   absl::StrCat("model '", name, "' serves checkpoint '", info.name(),
                                "' of model '", info.model(), "' on all shards, with id ",
                                HexId(result.model_id()), ": ", Work(result)));
}

}  // namespace

void AddServe(CLI::App& app, Session& session, Command& command) {
  const auto request = std::make_shared<v1::ServeCheckpointRequest>();
  const auto model = std::make_shared<CheckpointTarget>();
  const auto serve_as = std::make_shared<std::string>();
  const auto storage = std::make_shared<std::string>();
  CLI::App* serve = app.add_subcommand(
      "serve",
      "Serve the weights of a checkpoint for lookups only. What is served under the name now "
      "stays in service until the new rows are loaded, so that no lookup fails");
  serve->add_option("MODEL", model->model, "Name of the model of the checkpoint")->required();
  serve->add_option("NAME", model->name, "Name of the checkpoint; default: the newest");
  serve
      ->add_option("--as", *serve_as,
                   "Name of the model that serves it; default: MODEL, which must then not be "
                   "trained on this cluster")
      ->type_name("MODEL");
  serve
      ->add_option(
          "--storage", *storage,
          "How rows are stored; default: as those served under the name now, or else as in the "
          "checkpoint")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16"}));
  SetExample(serve, "emberctl serve my_model step-1000 --as my_model-live --storage bfloat16");
  serve->callback([request, model, serve_as, storage, &session, &command] {
    command = [request, model, serve_as, storage, &session] {
      request->set_model(model->model);
      request->set_name(model->name);
      request->set_serve_as(*serve_as);
      v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
      if (!storage->empty()) v1::DataType_Parse(absl::AsciiStrToUpper(*storage), &dtype);
      request->set_storage_dtype(dtype);
      return Serve(session, *request);
    };
  });
}

namespace {

absl::Status DropGroup(Session& session, const v1::DropGroupRequest& request) {
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::DropGroupResponse>(request));
  if (session.json) {
    PrintJson(response, session.out);
  } else {
    session.out << "group '" << request.group() << "' of model '" << request.model()
                << (response.dropped() ? "' dropped\n" : "' is not known: nothing to drop\n");
  }
  return absl::OkStatus();
}

}  // namespace

void AddGroup(CLI::App& app, Session& session, Command& command) {
  CLI::App* group = app.add_subcommand("group", "Drop a group of trainers");
  group->require_subcommand(1);
  SetExample(group, "emberctl group drop my_model run-7");
  const auto request = std::make_shared<v1::DropGroupRequest>();
  CLI::App* drop = group->add_subcommand(
      "drop",
      "Forget a group whose run is over: the next run under its name begins at its first step. An "
      "unknown group is not an error; one with active ranks is refused");
  drop->add_option("MODEL", *request->mutable_model(), "Name of the model")->required();
  drop->add_option("GROUP", *request->mutable_group(), "Name of the group")->required();
  SetExample(drop, "emberctl group drop my_model run-7");
  drop->callback([request, &session, &command] {
    command = [request, &session] { return DropGroup(session, *request); };
  });
}

}  // namespace emberd::emberctl
