#include "server/coordinator/checkpoint_save.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "config/shared_tables.h"
#include "server/checkpoint/chain_work.h"
#include "server/checkpoint/manifest.h"
#include "server/ops/logging.h"

namespace emberd::server {
namespace {

constexpr absl::Duration kHeartbeat = absl::Seconds(10);
constexpr absl::Duration kCompleteDeadline = absl::Seconds(5);

std::string TimeName(absl::Time time) {
  return absl::FormatTime("%Y%m%d-%H%M%S", time, absl::UTCTimeZone());
}

}  // namespace

CheckpointSave::CheckpointSave(const ShardSet& shards, const CheckpointStore* store,
                               std::shared_ptr<const ServedModel> model, SaveOptions options)
    : shards_(shards),
      store_(store),
      model_(std::move(model)),
      options_(std::move(options)),
      transfers_(shards) {}

CheckpointSave::~CheckpointSave() {
  if (!folder_.empty()) store_->Abandon(folder_);
}

bool CheckpointSave::IsLarge(rpc::CallContext* context) {
  if (manifest_.parent().empty()) return false;
  int64_t bytes = 0;
  const auto note = [&](int64_t, int64_t total) {
    bytes = total;
    return absl::CancelledError("that is all");
  };
  transfers_.Await(context, note).status().IgnoreError();  // Finish hears of errors, too
  return bytes > most_bytes_;
}

void CheckpointSave::ChooseParent(const ChangePause::Answers& answers) {
  const uint64_t known = answers.front().checkpoint_id();
  const bool all_know = std::all_of(answers.begin(), answers.end(), [&](const auto& answer) {
    return answer.checkpoint_id() == known;
  });
  if (!options_.incremental || known == 0 || !all_know) return;
  const auto chain = store_->Chain(model_->config.name(), std::string(kNewestCheckpoint));
  if (!chain.ok()) return;
  const v1::CheckpointManifest& newest = chain->front().manifest();
  if (newest.checkpoint_id() != known || newest.chain() >= options_.max_chain) return;
  const int64_t full = InfoOf(chain->back().manifest()).bytes();
  most_bytes_ = full / 2 - (BytesOf(*chain) - full);
  manifest_.set_parent(newest.name());
  manifest_.set_parent_id(known);
  manifest_.set_chain(newest.chain() + 1);
}

absl::Status CheckpointSave::CheckStep(const ChangePause::Answers& answers) const {
  if (!options_.before.has_value()) return absl::OkStatus();
  for (const internal::v1::HeldStep& group : answers.front().groups()) {
    if (group.group() != options_.before->group()) continue;
    if (group.next_step() == options_.before->next_step()) return absl::OkStatus();
    return absl::AbortedError(absl::StrCat(
        "group '", group.group(), "' has reached step ", group.next_step(),
        " before the checkpoint after step ", options_.before->next_step() - 1,
        " could be taken: other ranks were more than ", absl::FormatDuration(ChangePause::kLease),
        " behind; ask again with a later step"));
  }
  return absl::AbortedError(
      absl::StrCat("group '", options_.before->group(), "' is no longer known to the shards"));
}

void CheckpointSave::FillManifest(const ChangePause::Answers& answers) {
  const absl::Time now = absl::Now();  // a date
  manifest_.set_format_version(kManifestVersion);
  manifest_.set_model(model_->config.name());
  manifest_.set_checkpoint_id(absl::Uniform<uint64_t>(absl::BitGen(), 1, ~uint64_t{0}));
  manifest_.set_saved_at_ms(absl::ToUnixMillis(now));
  manifest_.set_model_id(model_->id);
  manifest_.set_history(model_->history);
  manifest_.set_automatic(options_.automatic);
  *manifest_.mutable_config() = model_->config;
  *manifest_.mutable_plan() = preprocess::PlanToProto(model_->config, model_->plan);
  std::map<std::string, int64_t> groups;
  for (const internal::v1::PauseChangesResponse& answer : answers) {
    manifest_.set_changes(std::max(manifest_.changes(), answer.changes()));
    for (const internal::v1::HeldStep& group : answer.groups()) {
      if (group.known()) groups[group.group()] = group.next_step();
    }
  }
  for (const auto& [group, next_step] : groups) {
    v1::GroupStep* const to = manifest_.add_groups();
    to->set_group(group);
    to->set_next_step(next_step);
  }
  manifest_.set_name(!options_.name.empty() ? options_.name
                     : groups.size() == 1   ? absl::StrCat("step-", groups.begin()->second)
                                            : TimeName(now));
}

absl::Status CheckpointSave::BeginOnShards(uint64_t pause_id, const ChangePause::Answers& answers,
                                           rpc::CallContext* context) {
  internal::v1::BeginSaveRequest request;
  request.set_model_id(model_->id);
  request.set_history(model_->history);
  request.set_pause_id(pause_id);
  request.set_transfer_id(transfers_.id());
  request.set_folder(folder_);
  request.set_checkpoint_id(manifest_.checkpoint_id());
  request.set_parent_id(manifest_.parent_id());
  return shards_.OnAll([&](int shard) {
    internal::v1::BeginSaveRequest here = request;
    here.set_changes(answers[shard].changes());
    return shards_[shard].BeginSave(here, context).status();
  });
}

absl::Status CheckpointSave::Begin(std::unique_ptr<ChangePause> pause, rpc::CallContext* context) {
  ASSIGN_OR_RETURN(folder_, store_->BeginSave(model_->config.name(), options_.name));
  ReachFailpoint("save.begins");
  const absl::Time began = SteadyNow();
  ASSIGN_OR_RETURN(const ChangePause::Answers answers, pause->Settle(context));
  RETURN_IF_ERROR(CheckStep(answers));
  ChooseParent(answers);
  FillManifest(answers);
  ReachFailpoint("save.changes_wait");
  const absl::Status begun = BeginOnShards(pause->id(), answers, context);
  pause->Resume();
  paused_ = SteadyNow() - began;
  return begun;
}

absl::StatusOr<v1::CheckpointManifest> CheckpointSave::Finish(rpc::CallContext* context,
                                                              const BytesReport& report) {
  absl::Time beat = SteadyNow();
  const auto beat_and_report = [&](int64_t bytes, int64_t total) -> absl::Status {
    if (SteadyNow() > beat + kHeartbeat) {
      beat = SteadyNow();
      RETURN_IF_ERROR(store_->Heartbeat(folder_));
    }
    return report(bytes, total);
  };
  ASSIGN_OR_RETURN(const ShardTransfers::Results results,
                   transfers_.Await(context, beat_and_report));
  for (const internal::v1::GetTransferResponse& result : results) {
    manifest_.mutable_files()->MergeFrom(result.files());
    *manifest_.add_states() = result.state_file();
  }
  ReachFailpoint("save.files_are_here");
  RETURN_IF_ERROR(store_->Commit(folder_, manifest_));
  folder_.clear();
  transfers_.Keep();
  ReachFailpoint("save.is_a_checkpoint");
  internal::v1::CompleteSaveRequest complete;
  complete.set_model_id(model_->id);
  complete.set_history(model_->history);
  complete.set_checkpoint_id(manifest_.checkpoint_id());
  rpc::CallContext completing(SteadyNow() + kCompleteDeadline, context->trace());
  // A shard that does not hear of it counts changes from further back: the next one is whole. And
  // its log goes on from an older one, which then stays.
  absl::Status heard = shards_.Ask(&ShardBackend::CompleteSave, complete, &completing).status();
  // Logs of rows that models share begin with none.
  const bool begins = options_.has_log && !config::HasSharedTables(model_->config);
  if (heard.ok() && begins) heard = store_->SetBeginning(manifest_, model_->history);
  if (!heard.ok()) {
    ops::Log(ops::LogLevel::kWarning, "not every shard has confirmed a checkpoint",
             {{"model", manifest_.model()},
              {"checkpoint", manifest_.name()},
              {"reason", std::string(heard.message())}});
  }
  return manifest_;
}

}  // namespace emberd::server
