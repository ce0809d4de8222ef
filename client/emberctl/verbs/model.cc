#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/verbs/checkpoint.h"
#include "client/emberctl/verbs/verb.h"

namespace emberd::emberctl {
namespace {

// Of a model that was dropped. A cluster without storage has no checkpoints.
void PrintWhatStays(Session& session, const std::string& name) {
  v1::ListCheckpointsRequest request;
  request.set_model(name);
  const auto list = session.Call<v1::ListCheckpointsResponse>(
      "/emberd.v1.CheckpointService/ListCheckpoints", request);
  if (!list.ok() || list->checkpoints().empty()) return;
  session.out << "what stays of it (see `emberctl checkpoint list " << name
              << "`): " << StoredText(*list) << "; `emberctl checkpoint prune " << name
              << "` deletes the latter\n";
}

absl::Status Drop(Session& session, const std::string& name) {
  v1::DropModelRequest request;
  request.set_name(name);
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::DropModelResponse>(
                                            "/emberd.v1.AdminService/DropModel", request));
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
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::ResetModelResponse>(
                                            "/emberd.v1.AdminService/ResetModel", request));
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

}  // namespace emberd::emberctl
