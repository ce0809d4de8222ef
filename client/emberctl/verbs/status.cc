#include "base/status.h"

#include "absl/strings/str_cat.h"
#include "client/emberctl/output.h"
#include "client/emberctl/shard_state.h"
#include "client/emberctl/verbs/verb.h"

namespace emberd::emberctl {
namespace {

void PrintShards(const v1::GetStatusResponse& status, std::ostream& out) {
  std::vector<std::vector<std::string>> lines = {{"SHARD", "ADDRESS", "STATE", "UP", "MODELS",
                                                  "TABLES", "BATCHES", "ROWS GATHERED",
                                                  "ROWS UPDATED"}};
  for (const v1::ShardStatus& shard : status.shards()) {
    std::vector<std::string>& line = lines.emplace_back();
    line = {absl::StrCat(shard.index()), shard.address(), StateOf(shard).text};
    if (!shard.reachable()) continue;  // why stands in the error at the end
    line.push_back(Uptime(shard.uptime_ms()));
    line.push_back(absl::StrCat(shard.models()));
    line.push_back(Bytes(shard.table_bytes()));
    line.push_back(absl::StrCat(shard.batches(), " (", Bytes(shard.batch_bytes()), ")"));
    line.push_back(absl::StrCat(shard.rows_gathered()));
    line.push_back(absl::StrCat(shard.rows_updated()));
  }
  PrintColumns(lines, out);
}

void PrintModels(const v1::GetStatusResponse& status, std::ostream& out) {
  std::vector<std::vector<std::string>> lines = {{"MODEL", "ID", "TABLES", "STACKS", "SIZE"}};
  for (const v1::ModelStatus& model : status.models()) {
    lines.push_back({model.name(), HexId(model.model_id()), absl::StrCat(model.tables()),
                     absl::StrCat(model.stacks()), Bytes(model.table_bytes())});
  }
  PrintColumns(lines, out);
  for (const v1::ModelStatus& model : status.models()) {
    if (!model.recovery().empty()) {
      out << "RECOVERING: model '" << model.name() << "': " << model.recovery() << "\n";
    } else if (!model.lost().empty()) {
      out << "LOST: " << model.lost() << "\n";
    } else if (!model.serves().empty()) {
      out << "SERVES: model '" << model.name() << "': checkpoint " << model.serves() << "\n";
    }
  }
}

absl::Status ShowStatus(Session& session) {
  ASSIGN_OR_RETURN(const v1::GetStatusResponse response, session.GetStatus());
  if (session.json) {
    PrintJson(response, session.out);
  } else {
    session.out << "emberd " << response.version() << ", up " << Uptime(response.uptime_ms())
                << (response.draining() ? ", DRAINING, " : ", ")
                << Counted(response.batches(), "batch", "batches") << " ("
                << Bytes(response.batch_bytes()) << ") between lookup and update\n\n";
    PrintShards(response, session.out);
    session.out << "\n";
    PrintModels(response, session.out);
  }
  for (const v1::ShardStatus& shard : response.shards()) {
    RETURN_IF_ERROR(CheckShard(shard));
  }
  for (const v1::ModelStatus& model : response.models()) {
    if (!model.recovery().empty()) {
      return absl::UnavailableError(
          absl::StrCat("model '", model.name(), "' is recovering: ", model.recovery()));
    }
    if (!model.lost().empty()) return absl::DataLossError(model.lost());
  }
  return absl::OkStatus();
}

}  // namespace

void AddStatus(CLI::App& app, Session& session, Command& command) {
  CLI::App* status = app.add_subcommand(
      "status",
      "Show the state of the coordinator (DRAINING while it is out of service), the shards and the "
      "models. Exit status 3 if a shard is down, or a shard or a model is recovering, 1 if a "
      "model has lost rows or a shard refuses changes");
  SetExample(status, "emberctl status --json");
  status->callback([&session, &command] { command = [&session] { return ShowStatus(session); }; });
}

}  // namespace emberd::emberctl
