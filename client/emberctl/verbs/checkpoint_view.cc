// emberctl checkpoint list, show, diff and delete: answers that come at once.
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/verbs/checkpoint.h"

namespace emberd::emberctl {
namespace {

std::string TimeText(int64_t since_1970_ms) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%SZ", absl::FromUnixMillis(since_1970_ms),
                          absl::UTCTimeZone());
}

absl::Status List(Session& session, const std::string& model) {
  v1::ListCheckpointsRequest request;
  request.set_model(model);
  ASSIGN_OR_RETURN(const auto response,
                   session.Call<v1::ListCheckpointsResponse>(
                       "/emberd.v1.CheckpointService/ListCheckpoints", request));
  if (session.json) {
    PrintJson(response, session.out);
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> lines = {
      {"MODEL", "NAME", "SAVED", "SIZE", "ROWS", "ON TOP OF", "MADE", "GROUPS"}};
  for (const v1::CheckpointInfo& info : response.checkpoints()) {
    lines.push_back({info.model(), info.name(), TimeText(info.saved_at_ms()), Bytes(info.bytes()),
                     absl::StrCat(info.rows()), info.parent().empty() ? "-" : info.parent(),
                     info.automatic() ? "automatic" : "on request", GroupsText(info.groups())});
  }
  if (response.checkpoints().empty()) {
    session.out << "no checkpoints\n";
  } else {
    PrintColumns(lines, session.out);
    session.out << StoredText(response) << "\n";
  }
  for (const std::string& damaged : response.damaged()) {
    session.out << "DAMAGED: " << damaged << "\n";
  }
  return absl::OkStatus();
}

void PrintManifest(const v1::CheckpointManifest& manifest, std::ostream& out) {
  out << "checkpoint '" << manifest.name() << "' of model '" << manifest.model() << "', id "
      << HexId(manifest.checkpoint_id()) << ", saved " << TimeText(manifest.saved_at_ms())
      << (manifest.automatic() ? " automatically" : " on request") << "\n";
  if (!manifest.parent().empty()) {
    out << "on top of '" << manifest.parent() << "'; needs "
        << Counted(manifest.chain(), "checkpoint") << " in addition to itself\n";
  }
  out << "model id " << HexId(manifest.model_id()) << ", history " << HexId(manifest.history())
      << ", " << Counted(manifest.changes(), "change") << ", "
      << Counted(manifest.plan().partitions(), "partition") << " on "
      << Counted(manifest.plan().shards(), "shard") << "\n"
      << "groups: " << GroupsText(manifest.groups()) << "\n\n";
  struct Sums {
    int64_t files = 0;
    int64_t rows = 0;
    int64_t bytes = 0;
  };
  std::map<std::pair<std::string, std::string>, Sums> arrays;
  for (const v1::CheckpointFile& file : manifest.files()) {
    Sums& sums = arrays[{file.stack(), file.array()}];
    ++sums.files;
    sums.rows += file.rows();
    sums.bytes += file.bytes();
  }
  std::vector<std::vector<std::string>> lines = {{"STACK", "ARRAY", "FILES", "ROWS", "SIZE"}};
  for (const auto& [array, sums] : arrays) {
    lines.push_back({array.first, array.second, absl::StrCat(sums.files), absl::StrCat(sums.rows),
                     Bytes(sums.bytes)});
  }
  PrintColumns(lines, out);
}

absl::Status Show(Session& session, const CheckpointTarget& target) {
  v1::GetCheckpointRequest request;
  request.set_model(target.model);
  request.set_name(target.name);
  ASSIGN_OR_RETURN(const auto manifest, session.Call<v1::CheckpointManifest>(
                                            "/emberd.v1.CheckpointService/GetCheckpoint", request));
  if (session.json) {
    PrintJson(manifest, session.out);
  } else {
    PrintManifest(manifest, session.out);
  }
  return absl::OkStatus();
}

absl::Status Diff(Session& session, const v1::DiffCheckpointsRequest& request) {
  ASSIGN_OR_RETURN(const auto response,
                   session.Call<v1::DiffCheckpointsResponse>(
                       "/emberd.v1.CheckpointService/DiffCheckpoints", request, kLong));
  if (session.json) {
    PrintJson(response, session.out);
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> lines = {
      {"TABLE", "SLOT", "ROWS", "CHANGED", "OF ALL", "MAX DIFFERENCE"}};
  for (const v1::ArrayDiff& array : response.arrays()) {
    lines.push_back({array.table(), array.slot().empty() ? "-" : array.slot(),
                     absl::StrCat(array.rows()), absl::StrCat(array.rows_changed()),
                     Percent(double(array.rows_changed()), double(array.rows())),
                     absl::StrFormat("%g", array.max_difference())});
  }
  PrintColumns(lines, session.out);
  if (!response.config_difference().empty()) {
    session.out << "configs differ: " << response.config_difference() << "\n";
  }
  return absl::OkStatus();
}

absl::Status Delete(Session& session, const v1::DeleteCheckpointRequest& request) {
  ASSIGN_OR_RETURN(const auto response,
                   session.Call<v1::DeleteCheckpointResponse>(
                       "/emberd.v1.CheckpointService/DeleteCheckpoint", request, kLong));
  if (session.json) {
    PrintJson(response, session.out);
  } else {
    session.out << "checkpoint '" << request.name() << "' of model '" << request.model()
                << "' deleted: " << Bytes(response.bytes()) << " freed\n";
  }
  return absl::OkStatus();
}

void AddList(CLI::App& checkpoint, Session& session, Command& command) {
  const auto model = std::make_shared<std::string>();
  CLI::App* list = checkpoint.add_subcommand("list", "Checkpoints, the newest first");
  list->add_option("MODEL", *model, "Name of a model; default: all");
  SetExample(list, "emberctl checkpoint list my_model");
  list->callback([model, &session, &command] {
    command = [model, &session] { return List(session, *model); };
  });
}

void AddShow(CLI::App& checkpoint, Session& session, Command& command) {
  const auto target = std::make_shared<CheckpointTarget>();
  CLI::App* show = checkpoint.add_subcommand(
      "show", "Show what a checkpoint holds; with --json its complete manifest");
  show->add_option("MODEL", target->model, "Name of the model")->required();
  show->add_option("NAME", target->name, "Name of the checkpoint; default: the newest");
  SetExample(show, "emberctl checkpoint show my_model step-1000 --json");
  show->callback([target, &session, &command] {
    command = [target, &session] { return Show(session, *target); };
  });
}

void AddDiff(CLI::App& checkpoint, Session& session, Command& command) {
  const auto request = std::make_shared<v1::DiffCheckpointsRequest>();
  CLI::App* diff =
      checkpoint.add_subcommand("diff", "Compare two checkpoints of a model, table by table");
  diff->add_option("MODEL", *request->mutable_model(), "Name of the model")->required();
  diff->add_option("BEFORE", *request->mutable_before(), "Name of a checkpoint")->required();
  diff->add_option("AFTER", *request->mutable_after(), "Name of another one")->required();
  SetExample(diff, "emberctl checkpoint diff my_model step-1000 step-2000");
  diff->callback([request, &session, &command] {
    command = [request, &session] { return Diff(session, *request); };
  });
}

void AddDelete(CLI::App& checkpoint, Session& session, Command& command) {
  const auto request = std::make_shared<v1::DeleteCheckpointRequest>();
  CLI::App* remove =
      checkpoint.add_subcommand("delete", "Remove a checkpoint that no other one builds on");
  remove->add_option("MODEL", *request->mutable_model(), "Name of the model")->required();
  remove->add_option("NAME", *request->mutable_name(), "Name of the checkpoint")->required();
  SetExample(remove, "emberctl checkpoint delete my_model step-1000");
  CLI::App* prune = checkpoint.add_subcommand(
      "prune",
      "Remove the automatic checkpoints of a model that nothing needs: all, if it was dropped. "
      "Those saved on request, and what they build on, stay");
  prune->add_option("MODEL", *request->mutable_model(), "Name of the model")->required();
  SetExample(prune, "emberctl checkpoint prune my_model");
  const auto run = [request, &session] { return Delete(session, *request); };
  remove->callback([run, &command] { command = run; });
  prune->callback([run, request, &command] {
    request->set_name("auto-*");
    command = run;
  });
}

}  // namespace

std::string StoredText(const v1::ListCheckpointsResponse& list) {
  int64_t all = 0, automatic = 0;
  for (const v1::CheckpointInfo& info : list.checkpoints()) {
    all += info.bytes();
    if (info.automatic()) automatic += info.bytes();
  }
  return absl::StrCat(Counted(list.checkpoints_size(), "checkpoint"), ": ", Bytes(all),
                      " on disk, of which ", Bytes(automatic), " were saved automatically");
}

void AddCheckpointViews(CLI::App& checkpoint, Session& session, Command& command) {
  AddList(checkpoint, session, command);
  AddShow(checkpoint, session, command);
  AddDiff(checkpoint, session, command);
  AddDelete(checkpoint, session, command);
}

}  // namespace emberd::emberctl
