#include "server/coordinator/checkpoints.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "config/config.h"
#include "config/shared_tables.h"
#include "preprocess/plan/plan.h"
#include "server/checkpoint/chain_work.h"
#include "server/checkpoint/manifest.h"
#include "server/files/files.h"
#include "server/ops/logging.h"

namespace emberd::coordinator {
namespace {

constexpr absl::Duration kHeartbeat = absl::Seconds(10);
// Shards have their logs on the disk first, which may be storage.log_bytes.
constexpr absl::Duration kCompleteDeadline = absl::Minutes(2);

// To the millisecond: a script may save twice within a second.
std::string TimeName() {
  return absl::FormatTime("%Y%m%d-%H%M%E3S", absl::Now(), absl::UTCTimeZone());  // a date
}

// How far a save, restore or the like is: turns the progress of one phase into messages, at most
// ten in a second.
class ProgressReporter {
 public:
  explicit ProgressReporter(const Checkpoints::Report& report) : report_(report) {}

  absl::Status Begin(const std::string& phase) {
    progress_.set_phase(phase);
    progress_.set_bytes(0);
    progress_.set_total_bytes(0);
    return Send();
  }
  absl::Status operator()(int64_t bytes, int64_t total_bytes) {
    progress_.set_bytes(bytes);
    progress_.set_total_bytes(std::max(bytes, total_bytes));
    return SteadyNow() < sent_ + absl::Milliseconds(100) ? absl::OkStatus() : Send();
  }
  // `model`: what has the rows now; null: none.
  v1::CheckpointProgress Done(const v1::CheckpointInfo& checkpoint,
                              const step::ServedModel* model = nullptr) {
    progress_.set_done(true);
    if (model != nullptr) {
      progress_.set_model_id(model->id);
      progress_.set_history(model->history);
    }
    progress_.set_elapsed_ms(absl::ToInt64Milliseconds(SteadyNow() - began_));
    *progress_.mutable_checkpoint() = checkpoint;
    return progress_;
  }

 private:
  absl::Status Send() {
    sent_ = SteadyNow();
    progress_.set_elapsed_ms(absl::ToInt64Milliseconds(sent_ - began_));
    return report_(progress_);
  }

  const Checkpoints::Report& report_;
  const absl::Time began_ = SteadyNow();
  absl::Time sent_ = absl::InfinitePast();
  v1::CheckpointProgress progress_;
};

constexpr int64_t kExportBytes = int64_t{1} << 20;
// How long a save that somebody asks for waits for another one of the model, such as one that came
// by itself.
constexpr absl::Duration kOtherSavePatience = absl::Minutes(1);
// Of the bytes of a model's tables, what its checkpoints saved on request take before a warning.
constexpr int64_t kMuchStored = 3;
constexpr absl::Duration kOtherSavePause = absl::Milliseconds(100);

// A model of this name for lookups alone: what is looked up is the same, and nothing is kept for
// updates. `dtype` UNSPECIFIED: rows are stored as in `served`, or else as they were.
absl::StatusOr<v1::ModelConfig> ServingConfig(v1::ModelConfig config, const std::string& name,
                                              v1::DataType dtype, const v1::ModelConfig& served) {
  config.set_name(name);
  config.clear_optimizer();
  config.mutable_optimizer()->mutable_none();
  for (v1::TableConfig& table : *config.mutable_tables()) {
    const std::string& seed_name = config::SeedName(config, table);
    if (seed_name != table.name()) table.set_seed_name(seed_name);
  }
  config.clear_enable_variable_deduplication();  // rows that stay as they are, of its own
  for (v1::TableConfig& table : *config.mutable_tables()) {
    table.clear_optimizer();
    table.clear_update_rounding();
    table.clear_on_nonfinite_gradient();
    table.clear_residency();
    for (const v1::TableConfig& now : served.tables()) {
      if (now.name() == table.name()) table.set_storage_dtype(now.storage_dtype());
    }
    if (dtype != v1::DATA_TYPE_UNSPECIFIED) table.set_storage_dtype(dtype);
  }
  RETURN_IF_ERROR(config::CompleteModel(&config));
  return config;
}

// Whoever finds the name taken, or gives up, has not failed.
void CountFailure(const step::ServedModel& model, const absl::Status& status) {
  if (absl::IsAlreadyExists(status) || absl::IsCancelled(status)) return;
  model.metrics->Add(ops::MetricId::kCheckpointFailures);
}

bool IsSameCheckpoint(const internal::v1::CheckpointSource& a,
                      const internal::v1::CheckpointSource& b) {
  return a.manifest().checkpoint_id() == b.manifest().checkpoint_id();
}

}  // namespace

std::string AutomaticName() { return absl::StrCat("auto-", TimeName()); }

CheckpointSave::CheckpointSave(const step::ShardSet& shards,
                               const checkpoint::CheckpointStore* store,
                               std::vector<SavedModel> models, SaveOptions options)
    : shards_(shards),
      store_(store),
      models_(std::move(models)),
      manifest_(models_.front().manifest),
      options_(std::move(options)),
      checkpoint_id_(rpc::RandomId()),
      transfers_(shards) {}

CheckpointSave::~CheckpointSave() {
  for (const SavedModel& saved : models_) {
    if (!saved.folder.empty()) store_->Abandon(saved.folder);
  }
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
  checkpoint::CheckpointStore::Damages damaged;
  const auto chain = store_->NewestChain(model().config.name(), &damaged);
  if (!chain.ok() || chain->front().manifest().checkpoint_id() != known) {
    LogPassedOver(model().config.name(), damaged, "none: a full one is saved");
    return;
  }
  const v1::CheckpointManifest& newest = chain->front().manifest();
  if (static_cast<int>(chain->size()) > options_.max_chain) return;
  const int64_t full = checkpoint::InfoOf(chain->back().manifest()).bytes();
  most_bytes_ = full / 2 - (checkpoint::BytesOf(*chain) - full);
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

void CheckpointSave::FillManifest(const ChangePause::Answers& answers, SavedModel* saved) const {
  v1::CheckpointManifest& manifest = saved->manifest;
  const step::ServedModel& model = *saved->model;
  manifest.set_format_version(checkpoint::kManifestVersion);
  manifest.set_model(model.config.name());
  manifest.set_checkpoint_id(checkpoint_id_);
  manifest.set_saved_at_ms(absl::ToUnixMillis(absl::Now()));  // a date
  manifest.set_model_id(model.id);
  manifest.set_history(model.history);
  manifest.set_automatic(options_.automatic || &manifest != &manifest_);
  *manifest.mutable_config() = model.config;
  *manifest.mutable_plan() = preprocess::PlanToProto(model.config, model.plan);
  std::map<std::string, int64_t> groups;
  for (const internal::v1::PauseChangesResponse& answer : answers) {
    manifest.set_changes(std::max(manifest.changes(), answer.changes()));
    for (const internal::v1::HeldStep& group : answer.groups()) {
      if (group.known()) groups[group.group()] = group.next_step();
    }
  }
  for (const auto& [group, next_step] : groups) {
    v1::GroupStep* const to = manifest.add_groups();
    to->set_group(group);
    to->set_next_step(next_step);
  }
  if (!manifest.name().empty()) return;
  manifest.set_name(TimeName());
  if (groups.size() != 1) return;
  const std::string step = absl::StrCat("step-", groups.begin()->second);
  // Other changes are made while a group stands still, and another run may have been there before.
  const auto taken = files::IsThere(absl::StrCat(saved->folder, "/../", step));
  if (taken.ok() && !*taken) manifest.set_name(step);
}

absl::Status CheckpointSave::BeginOnShards(const std::vector<ChangePause::Answers>& answers,
                                           rpc::CallContext* context) {
  return shards_.OnAll([&](int shard) {
    internal::v1::BeginSaveRequest request;
    for (size_t m = 0; m < models_.size(); ++m) {
      const SavedModel& saved = models_[m];
      internal::v1::BeginSaveRequest& of_model = m == 0 ? request : *request.add_others();
      of_model.set_model_id(saved.model->id);
      of_model.set_history(saved.model->history);
      of_model.set_pause_id(saved.pause->id());
      of_model.set_transfer_id(transfers_.id());
      of_model.set_folder(saved.folder);
      of_model.set_checkpoint_id(checkpoint_id_);
      of_model.set_parent_id(saved.manifest.parent_id());
      of_model.set_changes(answers[m][shard].changes());
    }
    return shards_[shard].BeginSave(request, context).status();
  });
}

absl::Status CheckpointSave::Begin(rpc::CallContext* context) {
  for (SavedModel& saved : models_) {
    const bool asked_for = &saved == &models_.front();
    saved.manifest.set_name(asked_for || options_.automatic ? options_.name : AutomaticName());
    ASSIGN_OR_RETURN(saved.folder,
                     store_->BeginSave(saved.model->config.name(), saved.manifest.name()));
  }
  ReachFailpoint("save.begins");
  const absl::Time began = SteadyNow();
  // In one order, so that of several who begin one goes on.
  std::map<uint64_t, size_t> order;
  for (size_t m = 0; m < models_.size(); ++m) order[models_[m].model->id] = m;
  std::vector<ChangePause::Answers> answers(models_.size());
  const absl::Cleanup resume = [this] {
    for (const SavedModel& saved : models_) saved.pause->Resume();
  };
  // Where there are several, each is asked again, so that no pause is over before the moment.
  for (size_t pass = 0; pass < std::min<size_t>(models_.size(), 2); ++pass) {
    for (const auto& [id, m] : order) {
      auto settled = models_[m].pause->Settle(context);
      if (!settled.ok()) return m == 0 ? settled.status() : OfOther(settled.status(), m);
      answers[m] = *std::move(settled);
    }
  }
  RETURN_IF_ERROR(CheckStep(answers.front()));
  ChooseParent(answers.front());
  for (size_t m = 0; m < models_.size(); ++m) FillManifest(answers[m], &models_[m]);
  ReachFailpoint("save.changes_wait");
  const absl::Status begun = BeginOnShards(answers, context);
  paused_ = SteadyNow() - began;
  return begun;
}

absl::Status CheckpointSave::OfOther(const absl::Status& status, size_t m) const {
  // One that has just been dropped or reset is not among those of the next try.
  const bool gone = absl::IsDataLoss(status) || absl::IsNotFound(status);
  return absl::Status(gone ? absl::StatusCode::kAborted : status.code(),
                      absl::StrCat("model '", models_[m].model->config.name(),
                                   "', which shares tables with model '", model().config.name(),
                                   "' and is saved with it: ", status.message()));
}

// The one that was asked for comes last: who finds it finds the others.
absl::Status CheckpointSave::Commit(rpc::CallContext* context) {
  // Since the shards were done, its rows may have been dropped or reset, or a save that was faster
  // may have committed a later moment: this one must not become the newest then.
  const auto still_wanted = [&] {
    return transfers_.Await(context, [](int64_t, int64_t) { return absl::OkStatus(); }).status();
  };
  for (auto saved = models_.rbegin(); saved != models_.rend(); ++saved) {
    const absl::Status status = store_->Commit(saved->folder, &saved->manifest, still_wanted);
    if (status.ok()) {
      saved->folder.clear();
      continue;
    }
    for (auto done = models_.rbegin(); done != saved; ++done) {  // no log begins with it
      store_->Delete(done->manifest.model(), done->manifest.name()).status().IgnoreError();
    }
    return status;
  }
  return absl::OkStatus();
}

absl::Status CheckpointSave::Finish(rpc::CallContext* context, const step::BytesReport& report) {
  absl::Time beat = SteadyNow();
  const auto beat_and_report = [&](int64_t bytes, int64_t total) -> absl::Status {
    if (SteadyNow() > beat + kHeartbeat) {
      beat = SteadyNow();
      for (const SavedModel& saved : models_) {
        RETURN_IF_ERROR(store_->Heartbeat(saved.folder));
      }
    }
    return report(bytes, total);
  };
  ASSIGN_OR_RETURN(const step::ShardTransfers::Results results,
                   transfers_.Await(context, beat_and_report));
  for (const internal::v1::GetTransferResponse& result : results) {
    if (result.others_size() + size_t{1} != models_.size()) {
      return absl::InternalError(absl::StrCat("a shard has written checkpoints of ",
                                              result.others_size() + 1, " models, not of ",
                                              models_.size(), "; is it of another version?"));
    }
    for (size_t m = 0; m < models_.size(); ++m) {
      const auto& of_model = m == 0 ? result : result.others(static_cast<int>(m) - 1);
      models_[m].manifest.mutable_files()->MergeFrom(of_model.files());
      *models_[m].manifest.add_states() = of_model.state_file();
    }
  }
  ReachFailpoint("save.files_are_here");
  RETURN_IF_ERROR(Commit(context));
  transfers_.Keep();
  ReachFailpoint("save.is_a_checkpoint");
  auto complete = step::OfRows<internal::v1::CompleteSaveRequest>(model().id, model().history);
  complete.set_checkpoint_id(checkpoint_id_);
  rpc::CallContext completing(SteadyNow() + kCompleteDeadline, context->trace());
  // A shard that does not hear of it counts changes from further back: the next one is whole. And
  // its log goes on from an older one, which then stays.
  absl::Status heard =
      shards_.Ask(&host::ShardBackend::CompleteSave, complete, &completing).status();
  for (const SavedModel& saved : models_) {
    if (!heard.ok() || !options_.has_log) break;
    heard = store_->SetBeginning(saved.manifest, saved.model->history);
  }
  if (!heard.ok()) {
    ops::Log(ops::LogLevel::kWarning, "not every shard has confirmed a checkpoint",
             {{"model", manifest_.model()},
              {"checkpoint", manifest_.name()},
              {"reason", heard.message()}});
  }
  return absl::OkStatus();
}

void LogPassedOver(const std::string& model, const checkpoint::CheckpointStore::Damages& damaged,
                   const std::string& taken) {
  for (const std::string& reason : damaged) {
    ops::Log(ops::LogLevel::kError,
             "a checkpoint is damaged, and was passed over; it may be newer than what is taken",
             {{"model", model}, {"taken", taken}, {"reason", reason}});
  }
}

absl::Status Checkpoints::CheckEnabled() const {
  if (!storage_.directory().empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "the cluster description has no storage, so there are no checkpoints; give it "
      "storage { directory: \"...\" }, or start `emberd up` with --data DIR");
}

absl::StatusOr<checkpoint::CheckpointChain> Checkpoints::ChainOf(const std::string& model,
                                                                 const std::string& name) const {
  RETURN_IF_ERROR(CheckEnabled());
  if (!name.empty() && name != checkpoint::kNewestCheckpoint) return store_.Chain(model, name);
  checkpoint::CheckpointStore::Damages damaged;
  ASSIGN_OR_RETURN(checkpoint::CheckpointChain chain, store_.NewestChain(model, &damaged));
  LogPassedOver(model, damaged, chain.front().manifest().name());
  return chain;
}

absl::StatusOr<RowSource> Checkpoints::FindRows(const std::string& model,
                                                const std::string& name) const {
  ASSIGN_OR_RETURN(checkpoint::CheckpointChain chain, ChainOf(model, name));
  return SourceOf(std::move(chain), [](int64_t, int64_t) { return absl::OkStatus(); });
}

RowSource Checkpoints::SourceOf(checkpoint::CheckpointChain chain, step::BytesReport report) const {
  const auto begins = [this, chain](uint64_t history) -> absl::Status {
    // It may have been checked for long, and rows that are served are given up for it.
    RETURN_IF_ERROR(CheckStands(chain));
    if (!has_log() || history == 0) return absl::OkStatus();
    return store_.SetBeginning(chain.front().manifest(), history);
  };
  return {std::move(chain), std::move(report), begins};
}

absl::Status Checkpoints::CheckStands(const checkpoint::CheckpointChain& chain) const {
  const v1::CheckpointManifest& checkpoint = chain.front().manifest();
  ASSIGN_OR_RETURN(const auto now, store_.Chain(checkpoint.model(), checkpoint.name()));
  if (absl::c_equal(now, chain, IsSameCheckpoint)) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("checkpoint \"", checkpoint.name(),
                                         "\" was replaced or merged meanwhile; try again"));
}

absl::Status Checkpoints::Explain(const checkpoint::CheckpointChain& chain,
                                  const absl::Status& status) const {
  if (absl::IsDataLoss(status)) RETURN_IF_ERROR(CheckStands(chain));
  return status;
}

// ---- Save

std::vector<SavedModel> Checkpoints::SavedWith(const step::ServedModelPtr& model,
                                               std::unique_ptr<ChangePause> pause) const {
  std::vector<SavedModel> saved;
  saved.push_back({model, std::move(pause)});
  if (!has_log() || !config::HasSharedTables(model->config)) return saved;
  const std::vector<ModelRegistry::Known> known = registry_->models();
  // Also those that share tables with these.
  for (size_t i = 0; i < saved.size(); ++i) {
    for (const ModelRegistry::Known& other : known) {
      const bool here = absl::c_any_of(
          saved, [&](const SavedModel& s) { return s.model->id == other.model->id; });
      if (here || config::CommonResource(other.model->config, saved[i].model->config).empty()) {
        continue;
      }
      saved.push_back({other.model, MakePause(other.model)});
    }
  }
  return saved;
}

std::unique_ptr<ChangePause> Checkpoints::MakePause(step::ServedModelPtr model) const {
  return std::make_unique<ChangePause>(shards_, mutations_, std::move(model));
}

absl::StatusOr<std::unique_ptr<CheckpointSave>> Checkpoints::BeginSave(
    step::ServedModelPtr model, SaveOptions options, std::unique_ptr<ChangePause> pause,
    rpc::CallContext* context) {
  RETURN_IF_ERROR(CheckEnabled());
  if (!options.name.empty()) RETURN_IF_ERROR(checkpoint::CheckNewCheckpointName(options.name));
  options.max_chain = std::max(storage_.max_chain(), 0);
  options.has_log = has_log();
  auto save = std::make_unique<CheckpointSave>(shards_, &store_, SavedWith(model, std::move(pause)),
                                               options);
  absl::Status begun = save->Begin(context);
  // StorageConfig.keep promises what automatic ones take.
  if (begun.ok() && options.automatic && save->IsLarge(context)) {
    save.reset();
    options.incremental = false;
    save = std::make_unique<CheckpointSave>(shards_, &store_, SavedWith(model, MakePause(model)),
                                            options);
    begun = save->Begin(context);
  }
  if (begun.ok()) return save;
  if (!absl::IsAborted(begun)) CountFailure(*model, begun);  // another save is under way
  return registry_->Explain(model->id, model->history, begun);
}

absl::Status InTurn(absl::Time until, absl::FunctionRef<bool()> over,
                    absl::FunctionRef<absl::Status()> begin) {
  const absl::Time give_up = std::min(SteadyNow() + kOtherSavePatience, until);
  while (true) {
    absl::Status begun = begin();
    if (!absl::IsAborted(begun) || over() || SteadyNow() + kOtherSavePause > give_up) return begun;
    absl::SleepFor(kOtherSavePause);
  }
}

absl::StatusOr<v1::CheckpointInfo> Checkpoints::FinishSave(CheckpointSave* save,
                                                           const step::BytesReport& report,
                                                           rpc::CallContext* context) {
  const absl::Status status = save->Finish(context, report);
  if (!status.ok()) {
    CountFailure(save->model(), status);
    return registry_->Explain(save->model().id, save->model().history, status);
  }
  for (const SavedModel& saved : save->models()) NoteSaved(saved, save->paused());
  return checkpoint::InfoOf(save->models().front().manifest);
}

void Checkpoints::NoteSaved(const SavedModel& saved, absl::Duration paused) const {
  const v1::CheckpointInfo info = checkpoint::InfoOf(saved.manifest);
  saved.model->metrics->AddCheckpoint(info.bytes(), paused);
  ops::Log(ops::LogLevel::kInfo, "checkpoint saved",
           {{"model", info.model()},
            {"checkpoint", info.name()},
            {"bytes", info.bytes()},
            {"pause_us", absl::ToInt64Microseconds(paused)}});
  if (info.automatic()) {
    const auto removed =
        RemoveAutomatic(info.model(), has_log() ? saved.model->history : 0, /*given_up=*/0);
    if (!removed.ok()) {
      ops::Log(ops::LogLevel::kWarning, "older automatic checkpoints could not be deleted",
               {{"model", info.model()}, {"reason", removed.status().message()}});
    }
  }
  CountStored(*saved.model, &info);
}

void Checkpoints::CountStored(const step::ServedModel& model,
                              const v1::CheckpointInfo* saved) const {
  const auto list = store_.List(model.config.name());
  if (!list.ok()) return;
  int64_t all = 0;
  int64_t bytes = 0;  // of those that were saved on request
  for (const v1::CheckpointInfo& info : list->checkpoints()) {
    all += info.bytes();
    if (!info.automatic()) bytes += info.bytes();
  }
  model.metrics->Set(ops::MetricId::kCheckpointStoredBytes, static_cast<double>(all));
  if (saved == nullptr || saved->automatic()) return;
  const int64_t tables = preprocess::PlanToProto(model.config, model.plan).table_bytes();
  const int64_t bound = kMuchStored * tables;
  // Once, when the bound is passed.
  if (bytes <= bound || bytes - saved->bytes() > bound) return;
  ops::Log(ops::LogLevel::kWarning,
           "checkpoints saved on request take much of the disk, and stay until "
           "`emberctl checkpoint delete` deletes them",
           {{"model", saved->model()}, {"bytes", bytes}, {"bytes_of_tables", tables}});
}

void Checkpoints::FinishLater(std::unique_ptr<CheckpointSave> save,
                              std::function<void(const absl::Status&)> done) {
  std::shared_ptr<CheckpointSave> shared = std::move(save);
  const auto finish = [this, shared, done] {
    done(FinishSave(
             shared.get(), [](int64_t, int64_t) { return absl::OkStatus(); }, &stopping_)
             .status());
  };
  const absl::Status taken =
      later_.Submit(finish, [] { return "too many checkpoints are being saved"; });
  if (taken.ok()) return;
  CountFailure(shared->model(), taken);
  done(taken);
}

Checkpoints::Progress Checkpoints::Save(const v1::SaveCheckpointRequest& request,
                                        const Report& report, rpc::CallContext* context) {
  RETURN_IF_ERROR(CheckEnabled());
  // It may have been reset, restored or replaced through another coordinator.
  ASSIGN_OR_RETURN(const auto model, registry_->FindByNameAnew(request.model(), context));
  RETURN_IF_ERROR(step::CheckNotReadOnly(*model, "there is nothing new to save"));
  ProgressReporter reporter(report);
  RETURN_IF_ERROR(reporter.Begin("pausing"));
  std::unique_ptr<CheckpointSave> save;
  const auto begin = [&]() -> absl::Status {
    const SaveOptions options = {.name = request.name(), .incremental = request.incremental()};
    ASSIGN_OR_RETURN(save, BeginSave(model, options, MakePause(model), context));
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(InTurn(
      context->deadline(), [&] { return context->cancelled(); }, begin));
  RETURN_IF_ERROR(reporter.Begin("saving"));
  ASSIGN_OR_RETURN(const v1::CheckpointInfo info,
                   FinishSave(save.get(), std::ref(reporter), context));
  v1::CheckpointProgress done = reporter.Done(info);
  done.set_pause_us(absl::ToInt64Microseconds(save->paused()));
  return done;
}

// ---- Restore

absl::Status Checkpoints::CheckFiles(const checkpoint::CheckpointChain& chain,
                                     const step::BytesReport& report, rpc::CallContext* context) {
  step::ShardTransfers transfers(shards_);
  internal::v1::BeginRestoreRequest request;
  request.set_transfer_id(transfers.id());
  request.set_check_only(true);
  request.mutable_chain()->Add(chain.begin(), chain.end());
  RETURN_IF_ERROR(shards_.Ask(&host::ShardBackend::BeginRestore, request, context).status());
  const int64_t total = checkpoint::BytesOf(chain);
  return transfers.Await(context, [&](int64_t bytes, int64_t) { return report(bytes, total); })
      .status();
}

Checkpoints::Progress Checkpoints::Restore(const v1::RestoreCheckpointRequest& request,
                                           const Report& report, rpc::CallContext* context) {
  ASSIGN_OR_RETURN(checkpoint::CheckpointChain chain, ChainOf(request.model(), request.name()));
  const v1::CheckpointManifest& manifest = chain.front().manifest();
  ASSIGN_OR_RETURN(const v1::ModelConfig config, checkpoint::RestoredConfig(manifest, request));
  const v1::CheckpointInfo info = checkpoint::InfoOf(chain);
  const int64_t total = checkpoint::BytesOf(chain);
  ProgressReporter reporter(report);
  // Rows that are served are given up only for what is known to be whole.
  const absl::Status served = registry_->FindByName(request.model(), context).status();
  if (!absl::IsNotFound(served) && !absl::IsDataLoss(served)) {
    RETURN_IF_ERROR(reporter.Begin("checking"));
    RETURN_IF_ERROR(Explain(chain, CheckFiles(chain, std::ref(reporter), context)));
  }
  RETURN_IF_ERROR(reporter.Begin("restoring"));
  const RowSource source =
      SourceOf(std::move(chain), [&](int64_t bytes, int64_t) { return reporter(bytes, total); });
  ASSIGN_OR_RETURN(const auto model, registry_->Restore(config, source, context));
  return reporter.Done(info, model.get());
}

// ---- Files

Checkpoints::Progress Checkpoints::Verify(const v1::VerifyCheckpointRequest& request,
                                          const Report& report, rpc::CallContext*) {
  ASSIGN_OR_RETURN(const checkpoint::CheckpointChain chain,
                   ChainOf(request.model(), request.name()));
  ProgressReporter reporter(report);
  RETURN_IF_ERROR(reporter.Begin("checking"));
  RETURN_IF_ERROR(Explain(chain, checkpoint::VerifyChain(chain, std::ref(reporter))));
  return reporter.Done(checkpoint::InfoOf(chain));
}

Checkpoints::Progress Checkpoints::Merge(const v1::MergeCheckpointRequest& request,
                                         const Report& report, rpc::CallContext*) {
  RETURN_IF_ERROR(CheckEnabled());
  RETURN_IF_ERROR(checkpoint::CheckCheckpointName(request.name()));
  ASSIGN_OR_RETURN(const checkpoint::CheckpointChain chain,
                   ChainOf(request.model(), request.name()));
  ProgressReporter reporter(report);
  RETURN_IF_ERROR(reporter.Begin("merging"));
  const auto info = checkpoint::MergeCheckpoint(
      store_, request.model(), chain.front().manifest().name(), std::ref(reporter));
  RETURN_IF_ERROR(Explain(chain, info.status()));
  return reporter.Done(*info);
}

absl::StatusOr<v1::DiffCheckpointsResponse> Checkpoints::Diff(
    const v1::DiffCheckpointsRequest& request, rpc::CallContext* context) {
  ASSIGN_OR_RETURN(const checkpoint::CheckpointChain before,
                   ChainOf(request.model(), request.before()));
  ASSIGN_OR_RETURN(const checkpoint::CheckpointChain after,
                   ChainOf(request.model(), request.after()));
  auto diff = checkpoint::DiffCheckpoints(
      before, after, [&](int64_t, int64_t) { return context->CheckNotCancelled(); });
  RETURN_IF_ERROR(Explain(before, Explain(after, diff.status())));
  return diff;
}

absl::StatusOr<v1::ListCheckpointsResponse> Checkpoints::List(
    const v1::ListCheckpointsRequest& request, rpc::CallContext* context) {
  RETURN_IF_ERROR(CheckEnabled());
  ASSIGN_OR_RETURN(v1::ListCheckpointsResponse list, store_.List(request.model()));
  const bool none = list.checkpoints().empty() && list.damaged().empty();
  if (none && !request.model().empty()) RETURN_IF_ERROR(CheckName(request.model(), context));
  return list;
}

absl::Status Checkpoints::CheckName(const std::string& model, rpc::CallContext* context) const {
  if (store_.GivenUpUntil(model).value_or(1) != 0) return absl::OkStatus();
  rpc::LinkedContext asking(context, absl::Seconds(2));
  const absl::Status found = registry_->FindByName(model, asking.get()).status();
  return absl::IsNotFound(found) ? found : absl::OkStatus();  // silent shards cannot tell
}

absl::StatusOr<v1::CheckpointManifest> Checkpoints::Get(const v1::GetCheckpointRequest& request,
                                                        rpc::CallContext*) {
  RETURN_IF_ERROR(CheckEnabled());
  if (!request.name().empty() && request.name() != checkpoint::kNewestCheckpoint) {
    return store_.Describe(request.model(), request.name());  // also if it builds on a damaged one
  }
  ASSIGN_OR_RETURN(const auto chain, ChainOf(request.model(), request.name()));
  return store_.Describe(request.model(), chain.front().manifest().name());
}

absl::StatusOr<uint64_t> Checkpoints::LoggedHistory(const std::string& model,
                                                    rpc::CallContext* context) {
  if (!has_log()) return 0;
  auto found = registry_->FindByNameAnew(model, context);
  if (absl::IsNotFound(found.status())) return 0;
  if (absl::IsDataLoss(found.status())) {
    // Some shards have its rows, and logs of them.
    const auto known = registry_->Recall(registry_->IdOf(model)).model;
    if (known != nullptr) found = known;
  }
  if (!found.ok()) {
    return Annotate(found.status(), "cannot tell which checkpoints the shards' logs continue from");
  }
  return (*found)->read_only() ? 0 : (*found)->history;
}

absl::StatusOr<int64_t> Checkpoints::RemoveAutomatic(const std::string& model, uint64_t history,
                                                     int64_t given_up) const {
  // A shard that has not heard of the newest one goes on from the one before.
  return store_.RemoveAutomatic(model, has_log() ? 2 : storage_.keep(), history, given_up,
                                [this](const auto& manifest) { return CheckNotShared(manifest); });
}

absl::Status Checkpoints::CheckNotShared(const v1::CheckpointManifest& manifest) const {
  if (!has_log()) return absl::OkStatus();
  for (const ModelRegistry::Known& other : registry_->models()) {
    const step::ServedModel& model = *other.model;
    if (model.history == manifest.history() ||
        config::CommonResource(model.config, manifest.config()).empty()) {
      continue;
    }
    ASSIGN_OR_RETURN(const bool begins, store_.HasBeginning(model.config.name(), model.history));
    if (begins) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("checkpoint \"", manifest.name(), "\" of model \"", manifest.model(),
                     "\" cannot be deleted: the shards may need it to recover what model \"",
                     model.config.name(), "\" shares with it; save model \"", model.config.name(),
                     "\" first (`emberctl checkpoint save ", model.config.name(), "`)"));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::DeleteCheckpointResponse> Checkpoints::Delete(
    const v1::DeleteCheckpointRequest& request, rpc::CallContext* context) {
  RETURN_IF_ERROR(CheckEnabled());
  ASSIGN_OR_RETURN(const uint64_t history, LoggedHistory(request.model(), context));
  if (has_log()) registry_->Learn(context);  // whoever has joined the model's rows may need it
  absl::StatusOr<int64_t> bytes;
  if (request.name() == checkpoint::kAutomaticCheckpoints) {
    ASSIGN_OR_RETURN(const int64_t given_up, store_.GivenUpUntil(request.model()));
    bytes = RemoveAutomatic(request.model(), history, given_up);
    const bool none = absl::IsNotFound(store_.Newest(request.model()).status());
    if (none) RETURN_IF_ERROR(CheckName(request.model(), context));
  } else {
    bytes = store_.Delete(request.model(), request.name(), history,
                          [this](const auto& manifest) { return CheckNotShared(manifest); });
  }
  RETURN_IF_ERROR(bytes.status());
  const auto known = registry_->Recall(registry_->IdOf(request.model())).model;
  if (known != nullptr) CountStored(*known, nullptr);
  v1::DeleteCheckpointResponse response;
  response.set_bytes(*bytes);
  return response;
}

absl::StatusOr<Checkpoints::NextRows> Checkpoints::StartExport(
    const v1::ExportCheckpointRequest& request, rpc::CallContext*) {
  auto chain = std::make_shared<checkpoint::CheckpointChain>();
  ASSIGN_OR_RETURN(*chain, ChainOf(request.model(), request.name()));
  ASSIGN_OR_RETURN(std::shared_ptr<checkpoint::TableReader> reader,
                   checkpoint::TableReader::Open(chain.get(), request.table(), request.slot()));
  const int64_t row_bytes = reader->columns() * static_cast<int64_t>(sizeof(float));
  const int64_t most = std::max<int64_t>(1, kExportBytes / row_bytes);
  int64_t next = 0;
  // The reader refers to the chain.
  return [this, chain, reader, row_bytes, most,
          next]() mutable -> absl::StatusOr<std::optional<v1::ExportCheckpointResponse>> {
    const int64_t count = std::min(most, reader->rows() - next);
    if (count <= 0) return std::nullopt;
    v1::ExportCheckpointResponse rows;
    rows.set_first_row(next);
    rows.set_columns(reader->columns());
    rows.mutable_values()->resize(count * row_bytes);
    auto* const values = reinterpret_cast<float*>(rows.mutable_values()->data());
    RETURN_IF_ERROR(Explain(*chain, reader->Read({.first = next, .count = count}, values)));
    next += count;
    return rows;
  };
}

// Checkpoints that are served: the weights of a model under training, read-only.

Checkpoints::Progress Checkpoints::Serve(const v1::ServeCheckpointRequest& request,
                                         const Report& report, rpc::CallContext* context) {
  ASSIGN_OR_RETURN(checkpoint::CheckpointChain chain, ChainOf(request.model(), request.name()));
  const v1::CheckpointManifest& manifest = chain.front().manifest();
  const std::string& name = request.serve_as().empty() ? request.model() : request.serve_as();
  v1::ModelConfig served;
  if (request.storage_dtype() == v1::DATA_TYPE_UNSPECIFIED) {
    const auto found = registry_->FindByName(name, context);
    if (found.ok() && (*found)->read_only()) served = (*found)->config;
  }
  ASSIGN_OR_RETURN(const v1::ModelConfig config,
                   ServingConfig(manifest.config(), name, request.storage_dtype(), served));
  const v1::CheckpointInfo info = checkpoint::InfoOf(chain);
  const int64_t total = checkpoint::BytesOf(chain);
  ProgressReporter reporter(report);
  bool begun = false;
  const auto tell = [&](int64_t bytes, int64_t) -> absl::Status {
    if (!begun) RETURN_IF_ERROR(reporter.Begin("loading"));
    begun = true;
    return reporter(bytes, total);
  };
  const RowSource source = SourceOf(std::move(chain), tell);
  ASSIGN_OR_RETURN(const auto model, registry_->Serve(config, source, context));
  return reporter.Done(info, model.get());
}

absl::StatusOr<step::ServedModelPtr> Checkpoints::ServeAgain(const step::ServedModel& lost,
                                                             const step::BytesReport& report,
                                                             rpc::CallContext* context) {
  ASSIGN_OR_RETURN(RowSource source, FindRows(lost.serves.model(), lost.serves.checkpoint()));
  if (source.chain.front().manifest().checkpoint_id() != lost.serves.checkpoint_id()) {
    return absl::NotFoundError(absl::StrCat("checkpoint '", step::ServesText(lost.serves),
                                            "' was removed; another checkpoint has its name now"));
  }
  source.report = report;
  return registry_->Serve(lost.config, source, context);
}

}  // namespace emberd::coordinator
