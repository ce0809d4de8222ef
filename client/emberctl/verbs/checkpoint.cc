// emberctl checkpoint save, verify, restore and merge: what takes time and shows progress.
#include "client/emberctl/verbs/checkpoint.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/terminal.h"
#include "config/config.h"

namespace emberd::emberctl {
namespace {

std::string TimeText(int64_t since_1970_ms) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%SZ", absl::FromUnixMillis(since_1970_ms),
                          absl::UTCTimeZone());
}

absl::Status List(Session& session, const std::string& model) {
  v1::ListCheckpointsRequest request;
  request.set_model(model);
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::ListCheckpointsResponse>(request));
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
  ASSIGN_OR_RETURN(const auto manifest, session.Call<v1::CheckpointManifest>(request));
  if (session.json) {
    PrintJson(manifest, session.out);
  } else {
    PrintManifest(manifest, session.out);
  }
  return absl::OkStatus();
}

absl::Status Diff(Session& session, const v1::DiffCheckpointsRequest& request) {
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::DiffCheckpointsResponse>(request, kLong));
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
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::DeleteCheckpointResponse>(request, kLong));
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

absl::StatusOr<v1::CheckpointProgress> RunCall(Session& session,
                                               const google::protobuf::Message& request) {
  Progress progress(session);
  return session.CallWithProgress(
      request, kLong, [&](const v1::CheckpointProgress& message) { progress.Show(message); });
}

std::string Work(const v1::CheckpointProgress& result) {
  const double seconds = static_cast<double>(result.elapsed_ms()) / 1000;
  std::string text = absl::StrCat(Bytes(result.bytes()), " in ", Seconds(seconds));
  if (seconds <= 0) return text;
  const auto rate = static_cast<int64_t>(static_cast<double>(result.bytes()) / seconds);
  return absl::StrCat(text, " (", Bytes(rate), "/s)");
}

absl::Status PrintDone(Session& session, const v1::CheckpointProgress& result,
                       const std::string& text) {
  if (session.json) {
    PrintJson(result, session.out);
  } else {
    session.out << text << "\n";
  }
  return absl::OkStatus();
}

namespace {

absl::Status Save(Session& session, const CheckpointTarget& target, bool incremental) {
  v1::SaveCheckpointRequest request;
  request.set_model(target.model);
  request.set_name(target.name);
  request.set_incremental(incremental);
  ASSIGN_OR_RETURN(const v1::CheckpointProgress result, RunCall(session, request));
  const v1::CheckpointInfo& info = result.checkpoint();
  const std::string parent =
      info.parent().empty() ? "" : absl::StrCat(", on top of '", info.parent(), "'");
  return PrintDone(
      session, result,
      absl::StrCat("checkpoint '", info.name(), "' of model '", info.model(),
                   "' saved: ", Counted(info.rows(), "row"), ", ", Work(result), parent,
                   "; updates paused ", Seconds(double(result.pause_us()) / 1e6),
                   "; groups: ", GroupsText(info.groups())));
}

absl::Status Verify(Session& session, const CheckpointTarget& target) {
  v1::VerifyCheckpointRequest request;
  request.set_model(target.model);
  request.set_name(target.name);
  ASSIGN_OR_RETURN(const v1::CheckpointProgress result, RunCall(session, request));
  const v1::CheckpointInfo& info = result.checkpoint();
  const std::string chain =
      info.chain() == 0
          ? ""
          : absl::StrCat(", with the ", Counted(info.chain(), "checkpoint"), " that it builds on");
  return PrintDone(session, result,
                   absl::StrCat("checkpoint '", info.name(), "' of model '", info.model(),
                                "' is intact", chain, ": ", Work(result)));
}

absl::Status Restore(Session& session, const CheckpointTarget& target, const std::string& config) {
  v1::RestoreCheckpointRequest request;
  request.set_model(target.model);
  request.set_name(target.name);
  if (!config.empty()) {
    ASSIGN_OR_RETURN(*request.mutable_config(), config::LoadModel(config));
  }
  ASSIGN_OR_RETURN(const v1::CheckpointProgress result, RunCall(session, request));
  const v1::CheckpointInfo& info = result.checkpoint();
  return PrintDone(
      session, result,
      absl::StrCat("model '", target.model, "' has the rows of checkpoint '", info.name(),
                   "' on all shards: ", Work(result), "; groups: ", GroupsText(info.groups())));
}

absl::Status Merge(Session& session, const CheckpointTarget& target) {
  v1::MergeCheckpointRequest request;
  request.set_model(target.model);
  request.set_name(target.name);
  ASSIGN_OR_RETURN(const v1::CheckpointProgress result, RunCall(session, request));
  const v1::CheckpointInfo& info = result.checkpoint();
  return PrintDone(session, result,
                   absl::StrCat("checkpoint '", info.name(), "' of model '", info.model(),
                                "' needs no other checkpoint", result.bytes() == 0 ? "" : ": ",
                                result.bytes() == 0 ? "" : Work(result)));
}

void AddSave(CLI::App& checkpoint, Session& session, Command& command) {
  const auto target = std::make_shared<CheckpointTarget>();
  const auto incremental = std::make_shared<bool>(false);
  CLI::App* save = checkpoint.add_subcommand(
      "save", "Save rows, slots and groups of one moment while training goes on");
  save->add_option("MODEL", target->model, "Name of the model")->required();
  save->add_option("NAME", target->name,
                   "Name of the checkpoint: letters, digits and _-.; default: the step of its "
                   "only group, or the time");
  save->add_flag("--incremental", *incremental,
                 "Save only what has changed since the newest checkpoint, where that is possible");
  SetExample(save, "emberctl checkpoint save my_model before-the-change");
  save->callback([target, incremental, &session, &command] {
    command = [target, incremental, &session] { return Save(session, *target, *incremental); };
  });
}

void AddVerify(CLI::App& checkpoint, Session& session, Command& command) {
  const auto target = std::make_shared<CheckpointTarget>();
  CLI::App* verify = checkpoint.add_subcommand(
      "verify",
      "Read every byte of a checkpoint, and of those that it builds on, and compare "
      "checksums");
  verify->add_option("MODEL", target->model, "Name of the model")->required();
  verify->add_option("NAME", target->name, "Name of the checkpoint; default: the newest");
  SetExample(verify, "emberctl checkpoint verify my_model step-1000");
  verify->callback([target, &session, &command] {
    command = [target, &session] { return Verify(session, *target); };
  });
}

void AddRestore(CLI::App& checkpoint, Session& session, Command& command) {
  const auto target = std::make_shared<CheckpointTarget>();
  const auto config = std::make_shared<std::string>();
  CLI::App* restore = checkpoint.add_subcommand(
      "restore",
      "Give a model the rows and groups of a checkpoint, or declare it with them. Its present rows "
      "are lost, and training streams end");
  restore->add_option("MODEL", target->model, "Name of the model")->required();
  restore->add_option("NAME", target->name, "Name of the checkpoint; default: the newest");
  restore
      ->add_option(
          "--config", *config,
          "A ModelConfig with the same tables, but another storage type or optimizer; "
          "slots that the checkpoint does not have begin with their initial values. A model "
          "declared with another config must be dropped first")
      ->type_name("FILE");
  SetExample(restore, "emberctl checkpoint restore my_model step-1000");
  restore->callback([target, config, &session, &command] {
    command = [target, config, &session] { return Restore(session, *target, *config); };
  });
}

void AddMerge(CLI::App& checkpoint, Session& session, Command& command) {
  const auto target = std::make_shared<CheckpointTarget>();
  CLI::App* merge = checkpoint.add_subcommand(
      "merge", "Turn an incremental checkpoint into a full one, which needs no other checkpoint");
  merge->add_option("MODEL", target->model, "Name of the model")->required();
  merge->add_option("NAME", target->name, "Name of the checkpoint")->required();
  SetExample(merge, "emberctl checkpoint merge my_model step-2000");
  merge->callback([target, &session, &command] {
    command = [target, &session] { return Merge(session, *target); };
  });
}

}  // namespace

std::string GroupsText(const google::protobuf::RepeatedPtrField<v1::GroupStep>& groups) {
  if (groups.empty()) return "-";
  return absl::StrJoin(groups, ", ", [](std::string* out, const v1::GroupStep& group) {
    absl::StrAppend(out, group.group(), " from step ", group.next_step());
  });
}

void AddCheckpoint(CLI::App& app, Session& session, Command& command) {
  CLI::App* checkpoint = app.add_subcommand(
      "checkpoint", "Save, inspect, restore, export and import checkpoints of models");
  checkpoint->require_subcommand(1);
  SetExample(checkpoint, "emberctl checkpoint save my_model");
  AddSave(*checkpoint, session, command);
  AddCheckpointViews(*checkpoint, session, command);
  AddVerify(*checkpoint, session, command);
  AddRestore(*checkpoint, session, command);
  AddMerge(*checkpoint, session, command);
  AddCheckpointExport(*checkpoint, session, command);
  AddCheckpointImport(*checkpoint, session, command);
}

}  // namespace emberd::emberctl
