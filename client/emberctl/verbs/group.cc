#include <memory>
#include <string>
#include <utility>

#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/verbs/verb.h"

namespace emberd::emberctl {
namespace {

absl::Status DropGroup(Session& session, const v1::DropGroupRequest& request) {
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::DropGroupResponse>(
                                            "/emberd.v1.AdminService/DropGroup", request));
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
