#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/plan_view.h"
#include "client/emberctl/verbs/verb.h"
#include "config/config.h"

namespace emberd::emberctl {
namespace {

absl::Status Declare(Session& session, const std::string& path, const std::string& restore_from) {
  ASSIGN_OR_RETURN(v1::ModelConfig config, config::LoadModel(path));
  v1::DeclareModelRequest request;
  *request.mutable_config() = config;
  request.set_restore_from(restore_from);
  // Rows are read before the answer comes.
  const absl::Duration deadline = restore_from.empty() ? absl::ZeroDuration() : absl::Hours(24);
  ASSIGN_OR_RETURN(const auto response,
                   session.Call<v1::DeclareModelResponse>(
                       "/emberd.v1.EmbeddingService/DeclareModel", request, deadline));
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

}  // namespace emberd::emberctl
