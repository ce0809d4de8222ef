// emberctl checkpoint: all but export and import.
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

void PrintDamaged(const v1::ListCheckpointsResponse& list, std::ostream& out) {
  for (const std::string& damaged : list.damaged()) out << "DAMAGED: " << damaged << "\n";
}

absl::Status ListCheckpoints(Session& session, const v1::ListCheckpointsRequest& request) {
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::ListCheckpointsResponse>(request));
  if (session.json) return PrintJson(response, session.out);
  Table lines = {{"MODEL", "NAME", "SAVED", "SIZE", "ROWS", "ON TOP OF", "MADE", "GROUPS"}};
  for (const v1::CheckpointInfo& info : response.checkpoints()) {
    lines.push_back({info.model(), info.name(), TimeText(info.saved_at_ms()), Bytes(info.bytes()),
                     info.rows(), info.parent().empty() ? "-" : info.parent(),
                     info.automatic() ? "automatic" : "on request", GroupsText(info.groups())});
  }
  if (response.checkpoints().empty()) {
    session.out << "no checkpoints\n";
  } else {
    PrintColumns(lines, session.out);
    session.out << StoredText(response) << "\n";
  }
  PrintDamaged(response, session.out);
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
  Table lines = {{"STACK", "ARRAY", "FILES", "ROWS", "SIZE"}};
  for (const auto& [array, sums] : arrays) {
    lines.push_back({array.first, array.second, sums.files, sums.rows, Bytes(sums.bytes)});
  }
  PrintColumns(lines, out);
}

absl::Status ShowCheckpoint(Session& session, const v1::GetCheckpointRequest& request) {
  v1::ListCheckpointsResponse list;  // where the newest is to be shown: what may be newer
  if (request.name().empty() && !session.json) {
    v1::ListCheckpointsRequest of_model;
    of_model.set_model(request.model());
    ASSIGN_OR_RETURN(list, session.Call<v1::ListCheckpointsResponse>(of_model));
  }
  ASSIGN_OR_RETURN(const auto manifest, session.Call<v1::CheckpointManifest>(request));
  if (session.json) return PrintJson(manifest, session.out);
  PrintManifest(manifest, session.out);
  for (const v1::CheckpointInfo& info : list.checkpoints()) {
    if (info.saved_at_ms() <= manifest.saved_at_ms()) break;
    session.out << "PASSED OVER: '" << info.name()
                << "' is newer, but what it builds on is damaged or missing\n";
  }
  PrintDamaged(list, session.out);
  return absl::OkStatus();
}

absl::Status DiffCheckpoints(Session& session, const v1::DiffCheckpointsRequest& request) {
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::DiffCheckpointsResponse>(request, kLong));
  if (session.json) return PrintJson(response, session.out);
  Table lines = {{"TABLE", "SLOT", "ROWS", "CHANGED", "OF ALL", "MAX DIFFERENCE"}};
  for (const v1::ArrayDiff& array : response.arrays()) {
    lines.push_back({array.table(), array.slot().empty() ? "-" : array.slot(), array.rows(),
                     array.rows_changed(), Percent(array.rows_changed(), array.rows()),
                     absl::StrFormat("%g", array.max_difference())});
  }
  PrintColumns(lines, session.out);
  if (!response.config_difference().empty()) {
    session.out << "configs differ: " << response.config_difference() << "\n";
  }
  return absl::OkStatus();
}

absl::Status DeleteCheckpoint(Session& session, const v1::DeleteCheckpointRequest& request) {
  ASSIGN_OR_RETURN(const auto response, session.Call<v1::DeleteCheckpointResponse>(request, kLong));
  return session.Answer(
      response, absl::StrCat("checkpoint '", request.name(), "' of model '", request.model(),
                             response.bytes() == 0
                                 ? "': nothing to delete"
                                 : absl::StrCat("' deleted: ", Bytes(response.bytes()), " freed")));
}

absl::Status SaveCheckpoint(Session& session, const v1::SaveCheckpointRequest& request) {
  ASSIGN_OR_RETURN(const v1::CheckpointProgress result, RunCall(session, request));
  const v1::CheckpointInfo& info = result.checkpoint();
  const std::string parent =
      info.parent().empty() ? "" : absl::StrCat(", on top of '", info.parent(), "'");
  return session.Answer(
      result, absl::StrCat("checkpoint '", info.name(), "' of model '", info.model(),
                           "' saved: ", Counted(info.rows(), "row"), ", ", Work(result), parent,
                           "; updates paused ", Seconds(result.pause_us() / 1e6),
                           "; groups: ", GroupsText(info.groups())));
}

absl::Status VerifyCheckpoint(Session& session, const v1::VerifyCheckpointRequest& request) {
  ASSIGN_OR_RETURN(const v1::CheckpointProgress result, RunCall(session, request));
  const v1::CheckpointInfo& info = result.checkpoint();
  const std::string chain =
      info.chain() == 0
          ? ""
          : absl::StrCat(", with the ", Counted(info.chain(), "checkpoint"), " that it builds on");
  return session.Answer(
      result, absl::StrCat("checkpoint '", info.name(), "' of model '", info.model(), "' is intact",
                           chain, ": ", Work(result)));
}

struct RestoreOptions {
  v1::RestoreCheckpointRequest request;
  std::string config;  // a file; empty: the checkpoint's
};

absl::Status RestoreCheckpoint(Session& session, const RestoreOptions& options) {
  v1::RestoreCheckpointRequest request = options.request;
  if (!options.config.empty()) {
    ASSIGN_OR_RETURN(*request.mutable_config(), config::LoadModel(options.config));
  }
  ASSIGN_OR_RETURN(const v1::CheckpointProgress result, RunCall(session, request));
  const v1::CheckpointInfo& info = result.checkpoint();
  return session.Answer(
      result,
      absl::StrCat("model '", request.model(), "' has the rows of checkpoint '", info.name(),
                   "' on all shards: ", Work(result), "; groups: ", GroupsText(info.groups())));
}

absl::Status MergeCheckpoint(Session& session, const v1::MergeCheckpointRequest& request) {
  ASSIGN_OR_RETURN(const v1::CheckpointProgress result, RunCall(session, request));
  const v1::CheckpointInfo& info = result.checkpoint();
  return session.Answer(result,
                        absl::StrCat("checkpoint '", info.name(), "' of model '", info.model(),
                                     "' needs no other checkpoint", result.bytes() == 0 ? "" : ": ",
                                     result.bytes() == 0 ? "" : Work(result)));
}

// Adds the arguments MODEL, and NAME, which is returned.
template <typename Request>
CLI::Option* AddTarget(CLI::App* verb, Request* request, const std::string& name_help) {
  verb->add_option("MODEL", *request->mutable_model(), "Name of the model")->required();
  return verb->add_option("NAME", *request->mutable_name(), name_help);
}

void AddSave(CLI::App& checkpoint, Session& session) {
  auto [save, request] =
      AddVerb(checkpoint, session, "save",
              "Save rows, slots and groups of one moment while training goes on",
              "emberctl checkpoint save my_model before-the-change", SaveCheckpoint);
  AddTarget(save, request,
            "Name of the checkpoint: letters, digits and _-.; default: the step of its only "
            "group, or the time");
  save->add_flag_callback(
      "--incremental", [to = request] { to->set_incremental(true); },
      "Save only what has changed since the newest checkpoint, where that is possible");
}

void AddViews(CLI::App& checkpoint, Session& session) {
  auto [list, which] = AddVerb(checkpoint, session, "list", "Checkpoints, the newest first",
                               "emberctl checkpoint list my_model", ListCheckpoints);
  list->add_option("MODEL", *which->mutable_model(), "Name of a model; default: all");
  auto [show, shown] =
      AddVerb(checkpoint, session, "show",
              "Show what a checkpoint holds; with --json its complete manifest",
              "emberctl checkpoint show my_model step-1000 --json", ShowCheckpoint);
  AddTarget(show, shown, "Name of the checkpoint; default: the newest");
  auto [diff, both] =
      AddVerb(checkpoint, session, "diff", "Compare two checkpoints of a model, table by table",
              "emberctl checkpoint diff my_model step-1000 step-2000", DiffCheckpoints);
  diff->add_option("MODEL", *both->mutable_model(), "Name of the model")->required();
  diff->add_option("BEFORE", *both->mutable_before(), "Name of a checkpoint")->required();
  diff->add_option("AFTER", *both->mutable_after(), "Name of another one")->required();
}

void AddDelete(CLI::App& checkpoint, Session& session) {
  auto [remove, one] =
      AddVerb(checkpoint, session, "delete", "Remove a checkpoint that no other one builds on",
              "emberctl checkpoint delete my_model step-1000", DeleteCheckpoint);
  AddTarget(remove, one, "Name of the checkpoint")->required();
  auto [prune, all] = AddVerb(
      checkpoint, session, "prune",
      "Remove the automatic checkpoints of a model that nothing needs: all, if it was dropped. "
      "Those saved on request, and what they build on, stay",
      "emberctl checkpoint prune my_model", DeleteCheckpoint);
  all->set_name("auto-*");
  prune->add_option("MODEL", *all->mutable_model(), "Name of the model")->required();
}

void AddRestore(CLI::App& checkpoint, Session& session) {
  auto [restore, options] = AddVerb(
      checkpoint, session, "restore",
      "Give a model the rows and groups of a checkpoint, or declare it with them. Its present rows "
      "are lost, and training streams end",
      "emberctl checkpoint restore my_model step-1000", RestoreCheckpoint);
  AddTarget(restore, &options->request, "Name of the checkpoint; default: the newest");
  restore
      ->add_option(
          "--config", options->config,
          "A ModelConfig with the same tables, but another storage type or optimizer; "
          "slots that the checkpoint does not have begin with their initial values. A model "
          "declared with another config must be dropped first")
      ->type_name("FILE");
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

absl::StatusOr<v1::CheckpointProgress> RunCall(Session& session,
                                               const google::protobuf::Message& request) {
  Progress progress(session);
  return session.CallWithProgress(
      request, kLong, [&](const v1::CheckpointProgress& message) { progress.Show(message); });
}

std::string Work(const v1::CheckpointProgress& result) {
  const double seconds = result.elapsed_ms() / 1000.0;
  std::string text = absl::StrCat(Bytes(result.bytes()), " in ", Seconds(seconds));
  if (seconds <= 0) return text;
  return absl::StrCat(text, " (", Bytes(static_cast<int64_t>(result.bytes() / seconds)), "/s)");
}

std::string GroupsText(const google::protobuf::RepeatedPtrField<v1::GroupStep>& groups) {
  if (groups.empty()) return "-";
  return absl::StrJoin(groups, ", ", [](std::string* out, const v1::GroupStep& group) {
    absl::StrAppend(out, group.group(), " from step ", group.next_step());
  });
}

void AddCheckpoint(CLI::App& app, Session& session) {
  CLI::App& checkpoint = AddGroupOfVerbs(
      app, "checkpoint", "Save, inspect, restore, export and import checkpoints of models",
      "emberctl checkpoint save my_model");
  AddSave(checkpoint, session);
  AddViews(checkpoint, session);
  AddDelete(checkpoint, session);
  auto [verify, verified] = AddVerb(
      checkpoint, session, "verify",
      "Read every byte of a checkpoint, and of those that it builds on, and compare checksums",
      "emberctl checkpoint verify my_model step-1000", VerifyCheckpoint);
  AddTarget(verify, verified, "Name of the checkpoint; default: the newest");
  AddRestore(checkpoint, session);
  auto [merge, merged] =
      AddVerb(checkpoint, session, "merge",
              "Turn an incremental checkpoint into a full one, which needs no other checkpoint",
              "emberctl checkpoint merge my_model step-2000", MergeCheckpoint);
  AddTarget(merge, merged, "Name of the checkpoint")->required();
  AddCheckpointExport(checkpoint, session);
  AddCheckpointImport(checkpoint, session);
}

}  // namespace emberd::emberctl
