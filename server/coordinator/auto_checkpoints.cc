#include "server/coordinator/auto_checkpoints.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "config/config.h"
#include "server/checkpoint/chain_work.h"
#include "server/checkpoint/manifest.h"
#include "server/files/files.h"

namespace emberd::coordinator {
namespace {

constexpr int kWatchesPerLook = 5;
// Between tries of a save that fails, and at least between those of a recovery where all
// checkpoints are damaged.
constexpr absl::Duration kSavePause = absl::Seconds(10);
// The same, before the process ends: until another save of the model is over.
constexpr absl::Duration kStopPause = absl::Milliseconds(50);
constexpr absl::Duration kFindDeadline = absl::Seconds(2);

std::string StepsOf(const std::vector<v1::GroupStep>& groups) {
  std::string text;
  for (const v1::GroupStep& group : groups) {
    absl::StrAppend(&text, ", group '", group.group(), "' at step ", group.next_step());
  }
  return text;
}

}  // namespace

AutoCheckpoints::~AutoCheckpoints() { stopping_.Cancel(); }

// ---- Rows that come back

absl::StatusOr<std::optional<RowSource>> AutoCheckpoints::FindRows(
    const v1::ModelConfig& config, const std::string& restore_from) const {
  if (!restore_from.empty()) {
    ASSIGN_OR_RETURN(RowSource source, checkpoints_->FindRows(config.name(), restore_from));
    RETURN_IF_ERROR(checkpoint::CheckSameTables(source.chain.front().manifest(), config));
    return std::optional(std::move(source));
  }
  if (!saves()) return std::nullopt;
  ASSIGN_OR_RETURN(const int64_t given_up, checkpoints_->store().GivenUpUntil(config.name()));
  ASSIGN_OR_RETURN(const bool may, MayRecover(config.name()));
  if (!may) {
    ASSIGN_OR_RETURN(const auto list, checkpoints_->store().ListAll(config.name()));
    if (list.damaged().empty() || !list.checkpoints().empty()) {
      LogPassedOver(config.name(), list.damaged(), "none: the model begins anew");
      return std::nullopt;
    }
  }
  auto source = FindRowsUnlessGivenUp(config.name(), "newest");
  if (source.ok() && source->chain.front().manifest().saved_at_ms() <= given_up) {
    source = absl::DataLossError(
        absl::StrCat("all checkpoints of model '", config.name(),
                     "' since it was dropped or reset are damaged (`emberctl checkpoint list ",
                     config.name(), "` names the files)"));
  }
  if (absl::IsDataLoss(source.status())) {
    return absl::DataLossError(absl::StrCat(
        source.status().message(),
        "; the model would begin anew: bring the files back, or, if it may, delete each checkpoint "
        "that is damaged (`emberctl checkpoint delete ",
        config.name(), " NAME`; NAME is the folder of the file), or move these folders away"));
  }
  RETURN_IF_ERROR(source.status());
  const v1::CheckpointManifest& newest = source->chain.front().manifest();
  if (config::DifferInSamplesAlone(newest.config(), config))
    return std::optional(*std::move(source));
  return absl::FailedPreconditionError(absl::StrCat(
      "model '", config.name(), "' has checkpoints of another config (first difference: ",
      config::FirstDifference(newest.config(), config), "); `emberctl checkpoint restore ",
      config.name(), "` brings back the model as it was, `emberctl model drop ", config.name(),
      "` makes room for this one, and restore_from gives it the rows of a checkpoint"));
}

absl::StatusOr<RowSource> AutoCheckpoints::FindRowsUnlessGivenUp(const std::string& model,
                                                                 const std::string& name) const {
  ASSIGN_OR_RETURN(RowSource source, checkpoints_->FindRows(model, name));
  const int64_t saved_at_ms = source.chain.front().manifest().saved_at_ms();
  source.still_wanted = [this, model, saved_at_ms]() -> absl::Status {
    ASSIGN_OR_RETURN(const int64_t given_up, checkpoints_->store().GivenUpUntil(model));
    if (saved_at_ms > given_up) return absl::OkStatus();
    return absl::AbortedError(
        absl::StrCat("model '", model, "' was dropped or reset meanwhile; try again"));
  };
  return source;
}

absl::StatusOr<bool> AutoCheckpoints::MayRecover(const std::string& model) const {
  ASSIGN_OR_RETURN(const int64_t given_up, checkpoints_->store().GivenUpUntil(model));
  ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse list, checkpoints_->store().ListAll(model));
  return std::any_of(list.checkpoints().begin(), list.checkpoints().end(),
                     [&](const v1::CheckpointInfo& info) { return info.saved_at_ms() > given_up; });
}

step::ServedModelPtr AutoCheckpoints::ReadOnly(const std::string& model) const {
  const auto known = registry_->Recall(registry_->IdOf(model)).model;
  return known != nullptr && known->read_only() ? known : nullptr;
}

absl::Status AutoCheckpoints::ExplainLost(const std::string& model, const absl::Status& lost) {
  const auto serves = ReadOnly(model);
  if (!recovers() && serves == nullptr) return lost;
  const bool under_way = [&] {
    absl::MutexLock lock(&mutex_);
    return recoveries_.contains(model);
  }();
  if (!under_way) {
    // What cannot be read now may be soon; the recovery says why.
    const bool may = serves == nullptr ? MayRecover(model).value_or(true) : MayServeAgain(*serves);
    if (!may) return lost;
    StartRecovery(model);
  }
  return absl::UnavailableError(
      absl::StrCat("model '", model, "' is recovering: ", RecoveryOf(model), "; retry"));
}

std::string AutoCheckpoints::RecoveryOf(const std::string& model) const {
  absl::MutexLock lock(&mutex_);
  const auto found = recoveries_.find(model);
  const auto failed = failures_.find(model);
  const Failure failure = failed == failures_.end() ? Failure() : failed->second;
  const absl::Duration pause = failure.again - SteadyNow();
  if (found == recoveries_.end() && pause <= absl::ZeroDuration()) return "";
  if (found == recoveries_.end() || found->second.total_bytes == 0) {
    return absl::StrCat(
        "it goes back to its newest checkpoint",
        failure.reason.empty() ? "" : absl::StrCat("; the last attempt failed: ", failure.reason),
        found != recoveries_.end()
            ? ""
            : absl::StrCat("; the next attempt begins in ", absl::ToInt64Seconds(pause) + 1, " s"));
  }
  const Recovery& recovery = found->second;
  constexpr double kGiB = 1 << 30;
  const double share = static_cast<double>(recovery.bytes) / recovery.total_bytes;
  const absl::Duration left =
      share <= 0 ? absl::ZeroDuration() : (SteadyNow() - recovery.began) * ((1 - share) / share);
  return absl::StrFormat("it goes back to checkpoint '%s'%s, %.0f %% of %.1f GiB, about %d s left",
                         recovery.checkpoint, StepsOf(recovery.groups), 100 * share,
                         recovery.total_bytes / kGiB, absl::ToInt64Seconds(left));
}

void AutoCheckpoints::StartRecovery(const std::string& model) {
  {
    absl::MutexLock lock(&mutex_);
    if (SteadyNow() < failures_[model].again || !recoveries_.try_emplace(model).second) return;
  }
  const auto over = [this, model] {
    absl::MutexLock lock(&mutex_);
    recoveries_.erase(model);
  };
  const auto recover = [this, model, over] {
    const absl::Time began = SteadyNow();
    const absl::Status status = Recover(model);
    {
      absl::MutexLock lock(&mutex_);
      // All were read for nothing: most of the time, the disk is for others.
      const absl::Duration pause = std::max(kSavePause, 3 * (SteadyNow() - began));
      failures_[model] = {std::string(status.message()),
                          absl::IsDataLoss(status) ? SteadyNow() + pause : absl::InfinitePast()};
    }
    over();
    // Another coordinator may have been faster, or a shard is not back yet: Watch looks again.
    if (status.ok() || absl::IsAborted(status) || absl::IsUnavailable(status)) return;
    ops::Log(ops::LogLevel::kError, "a lost model could not be restored",
             {{"model", model}, {"reason", status.message()}});
  };
  if (!tasks_.Submit(recover, [] { return "too many models come back"; }).ok()) over();
}

bool AutoCheckpoints::MayServeAgain(const step::ServedModel& model) const {
  const auto manifest = checkpoints_->store().Read(model.serves.model(), model.serves.checkpoint());
  if (!manifest.ok()) return !files::IsGone(manifest.status());
  return manifest->checkpoint_id() == model.serves.checkpoint_id();
}

absl::Status AutoCheckpoints::ServeAgain(const step::ServedModel& model) {
  ASSIGN_OR_RETURN(const checkpoint::CheckpointChain chain,
                   checkpoints_->store().Chain(model.serves.model(), model.serves.checkpoint()));
  const int64_t total = checkpoint::BytesOf(chain);
  const auto tell = [&](int64_t bytes, int64_t) {
    absl::MutexLock lock(&mutex_);
    Recovery& recovery = recoveries_[model.config.name()];
    recovery.checkpoint = step::ServesText(model.serves);
    recovery.bytes = std::min(bytes, total);
    recovery.total_bytes = total;
    return absl::OkStatus();
  };
  ASSIGN_OR_RETURN(const auto served, checkpoints_->ServeAgain(model, tell, &stopping_));
  served->metrics->Add(ops::MetricId::kModelRecoveries);
  return absl::OkStatus();
}

absl::Status AutoCheckpoints::Recover(const std::string& model) {
  if (const auto serves = ReadOnly(model); serves != nullptr) return ServeAgain(*serves);
  ASSIGN_OR_RETURN(const int64_t given_up, checkpoints_->store().GivenUpUntil(model));
  ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse list, checkpoints_->store().ListAll(model));
  absl::Status status = absl::NotFoundError("there is no checkpoint to go back to");
  for (const v1::CheckpointInfo& info : list.checkpoints()) {
    if (info.saved_at_ms() <= given_up) break;
    status = RecoverFrom(info);
    if (status.ok()) LogPassedOver(model, list.damaged(), info.name());
    if (!files::IsGone(status)) return status;  // which says nothing against the checkpoint
    ops::Log(ops::LogLevel::kError, "a checkpoint is damaged; trying an older one",
             {{"model", model}, {"checkpoint", info.name()}, {"reason", status.message()}});
  }
  return status;
}

absl::Status AutoCheckpoints::RecoverFrom(const v1::CheckpointInfo& checkpoint) {
  const std::string& model = checkpoint.model();
  ASSIGN_OR_RETURN(RowSource source, FindRowsUnlessGivenUp(model, checkpoint.name()));
  const int64_t total = checkpoint::BytesOf(source.chain);
  const auto tell = [&](int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    Recovery& recovery = recoveries_[model];
    recovery.checkpoint = checkpoint.name();
    recovery.groups = {checkpoint.groups().begin(), checkpoint.groups().end()};
    recovery.bytes = std::min(bytes, total);
    recovery.total_bytes = total;
  };
  tell(0);
  source.only_lost = true;
  source.report = [&](int64_t bytes, int64_t) {
    tell(bytes);
    return absl::OkStatus();
  };
  const auto restored =
      registry_->Restore(source.chain.front().manifest().config(), source, &stopping_);
  // It was found in its folder: another call has deleted it since, which is no damage.
  if (absl::IsNotFound(restored.status())) {
    return absl::AbortedError(restored.status().message());
  }
  RETURN_IF_ERROR(restored.status());
  (*restored)->metrics->Add(ops::MetricId::kModelRecoveries);
  ops::Log(ops::LogLevel::kWarning, "a model that had lost rows is back at a checkpoint",
           {{"model", model},
            {"checkpoint", checkpoint.name()},
            {"steps", StepsOf({checkpoint.groups().begin(), checkpoint.groups().end()})}});
  return absl::OkStatus();
}

void AutoCheckpoints::RecoverAbsent() {
  absl::Status unreadable;
  const auto list = checkpoints_->store().List("", &unreadable);
  unreadable.Update(list.status());
  if (!unreadable.ok()) {
    unreadable_.Log(ops::LogLevel::kError, "what has lost its rows may not come back",
                    {{"reason", unreadable.message()}});
  }
  if (!list.ok()) return;
  std::set<std::string> models;
  for (const v1::CheckpointInfo& info : list->checkpoints()) models.insert(info.model());
  for (const std::string& model : models) {
    rpc::CallContext context(SteadyNow() + kFindDeadline);
    // NOT_FOUND only when all shards have answered.
    if (!absl::IsNotFound(registry_->FindByName(model, &context).status())) continue;
    if (MayRecover(model).value_or(true)) StartRecovery(model);
  }
}

// ---- Saves

absl::Status AutoCheckpoints::GiveUpRows(const std::string& model, uint64_t history) {
  if (!saves()) return absl::OkStatus();
  return Annotate(checkpoints_->store().GiveUp(model, history),
                  absl::StrCat(history == 0 ? "nothing has changed" : "the rows are gone",
                               ", but it could not be noted that model '", model,
                               "' is not to come back from a checkpoint; call again"));
}

bool AutoCheckpoints::Due(const Saved& saved, const step::ServedModel& model, Reason reason) const {
  // Rows that are new altogether, as after a declaration or a reset: lost, they could not be
  // brought back.
  if (saved.history != model.history) return true;
  const v1::StorageConfig& storage = checkpoints_->storage();
  const internal::v1::HostedModel rows = registry_->Recall(model.id).rows;
  const int64_t since = rows.changes() - saved.changes;
  // Also where nothing has changed since: a shard may not have heard of the newest checkpoint.
  if (has_log()) return rows.pins_log() && (since > 0 || SteadyNow() >= saved.at + kSavePause);
  // Where no shard answers, nobody knows whether anything has changed.
  if (reason == Reason::kStop && rows.model_id() == 0) return true;
  if (since <= 0) return false;
  if (reason == Reason::kStop) return true;
  return SteadyNow() >= saved.at + absl::Seconds(storage.every_seconds()) ||
         (storage.every_steps() > 0 && since >= storage.every_steps());
}

void AutoCheckpoints::SaveIfDue(const step::ServedModelPtr& model) {
  const std::string& name = model->config.name();
  {
    absl::MutexLock lock(&mutex_);
    Saved& saved = saved_[name];
    if (saved.saving || SteadyNow() < saved.tried + kSavePause ||
        !Due(saved, *model, Reason::kDue)) {
      return;
    }
    saved.saving = true;
  }
  const auto over = [this, name](const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    saved_[name].saving = false;
    saved_[name].tried = status.ok() ? absl::InfinitePast() : SteadyNow();
  };
  const auto save = [this, model, name, over] {
    const absl::Status status = Save(model, Reason::kDue, &stopping_);
    over(status);
    // Another save of the model was under way, or the model has just changed.
    if (status.ok() || absl::IsAborted(status) || IsGone(*model, status)) return;
    ops::Log(ops::LogLevel::kError, "a checkpoint could not be saved",
             {{"model", name}, {"reason", status.message()}});
  };
  if (!tasks_.Submit(save, [] { return "too many models are saved"; }).ok()) over(absl::OkStatus());
}

absl::Status AutoCheckpoints::Save(const step::ServedModelPtr& model, Reason reason,
                                   rpc::CallContext* context) {
  const std::string& name = model->config.name();
  const auto remember = [&](uint64_t history, int64_t changes, int64_t saved_at_ms) {
    absl::MutexLock lock(&mutex_);
    Saved& saved = saved_[name];
    // By the clock of whoever saved it. What that has dated ahead of this one's gets older, too.
    const absl::Duration age = absl::Now() - absl::FromUnixMillis(saved_at_ms);  // a date
    const absl::Time at = SteadyNow() - std::max(age, absl::ZeroDuration());
    const bool known = saved.history == history && saved.changes == changes;
    saved.at = known && age < absl::ZeroDuration() ? std::min(saved.at, at) : at;
    saved.history = history;
    saved.changes = changes;
    return Due(saved, *model, reason);
  };
  const auto newest = checkpoints_->store().Newest(name);
  if (newest.ok() && newest->history() == model->history &&
      !remember(newest->history(), newest->changes(), newest->saved_at_ms())) {
    return absl::OkStatus();
  }
  // A save that began now would only be given up, which takes time where a shard is silent.
  if (SteadyNow() > context->deadline()) {
    return absl::DeadlineExceededError("the time for saving models was over before its turn");
  }
  ASSIGN_OR_RETURN(const auto save,
                   checkpoints_->BeginSave(
                       model, {.name = AutomaticName(), .incremental = true, .automatic = true},
                       checkpoints_->MakePause(model), context));
  ASSIGN_OR_RETURN(const v1::CheckpointInfo info,
                   checkpoints_->FinishSave(
                       save.get(), [](int64_t, int64_t) { return absl::OkStatus(); }, context));
  if (reason == Reason::kStop) {
    ops::Log(ops::LogLevel::kInfo, "a model was saved before the stop",
             {{"model", name},
              {"checkpoint", info.name()},
              {"steps", StepsOf({info.groups().begin(), info.groups().end()})}});
  }
  remember(model->history, info.changes(), info.saved_at_ms());
  return absl::OkStatus();
}

absl::Status AutoCheckpoints::SaveAtStop(absl::Time end) {
  registry_->Watch();  // what has changed until now
  rpc::CallContext context(end);
  std::vector<step::ServedModelPtr> unsaved;
  std::vector<std::string> lost;
  for (const ModelRegistry::Known& known : registry_->models()) {
    if (!known.model->read_only() && known.lost.empty()) unsaved.push_back(known.model);
  }
  const auto is_over = [&](const step::ServedModelPtr& model) {
    const absl::Status status = Save(model, Reason::kStop, &context);
    // Another coordinator stops, too: it saves at this moment, or has saved since the newest
    // checkpoint was read, so that a shard has nothing to tell from there on.
    const bool again = absl::IsAborted(status) || absl::IsFailedPrecondition(status);
    if (again && SteadyNow() < end) return false;
    if (status.ok() || IsGone(*model, status)) return true;
    ops::Log(ops::LogLevel::kError, "a model could not be saved before the stop: changes are lost",
             {{"model", model->config.name()}, {"reason", status.message()}});
    lost.push_back(model->config.name());
    return true;
  };
  // Whichever model has to wait, the others need not.
  while (std::erase_if(unsaved, is_over), !unsaved.empty()) absl::SleepFor(kStopPause);
  if (lost.empty()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("could not be saved before the stop: model ",
                                             absl::StrJoin(lost, ", "),
                                             "; what has changed is lost when the shards stop"));
}

void AutoCheckpoints::Watch() {
  for (const ModelRegistry::Known& known : registry_->models()) {
    if (known.lost.empty()) {
      absl::MutexLock lock(&mutex_);
      failures_.erase(known.model->config.name());
    }
    if (known.model->read_only()) {
      if (!known.lost.empty() && MayServeAgain(*known.model)) {
        StartRecovery(known.model->config.name());
      }
      continue;
    }
    if (!saves()) continue;
    if (known.lost.empty()) {
      SaveIfDue(known.model);
    } else if (recovers() && MayRecover(known.model->config.name()).value_or(true)) {
      StartRecovery(known.model->config.name());
    }
  }
  if (recovers() && watches_++ % kWatchesPerLook == 0) RecoverAbsent();
}

}  // namespace emberd::coordinator
