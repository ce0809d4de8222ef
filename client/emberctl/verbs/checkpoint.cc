// emberctl checkpoint save, verify, restore and merge: what takes time and shows progress.
#include "client/emberctl/verbs/checkpoint.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "client/emberctl/progress.h"
#include "config/config.h"

namespace emberd::emberctl {

absl::StatusOr<v1::CheckpointProgress> RunCall(Session& session, const char* method,
                                               const google::protobuf::MessageLite& request) {
  Progress progress(session);
  return session.CallWithProgress(
      method, request, kLong,
      [&](const v1::CheckpointProgress& message) { progress.Show(message); });
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
  ASSIGN_OR_RETURN(const v1::CheckpointProgress result,
                   RunCall(session, "/emberd.v1.CheckpointService/SaveCheckpoint", request));
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
  ASSIGN_OR_RETURN(const v1::CheckpointProgress result,
                   RunCall(session, "/emberd.v1.CheckpointService/VerifyCheckpoint", request));
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
  ASSIGN_OR_RETURN(const v1::CheckpointProgress result,
                   RunCall(session, "/emberd.v1.CheckpointService/RestoreCheckpoint", request));
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
  ASSIGN_OR_RETURN(const v1::CheckpointProgress result,
                   RunCall(session, "/emberd.v1.CheckpointService/MergeCheckpoint", request));
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
