#include "server/host/hosted_models.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/suggest.h"
#include "config/config.h"
#include "config/shared_tables.h"
#include "server/ops/logging.h"

namespace emberd::host {
namespace {

constexpr size_t kMaxDropped = 256;

// Rows that follow one another under one model_id need ids of their own.
uint64_t EngineId(uint64_t model_id, uint64_t history, bool serves) {
  return serves ? history : model_id;
}
uint64_t EngineId(const internal::v1::CreateModelRequest& request) {
  return EngineId(request.model_id(), request.history(), request.has_serves());
}

absl::Status ChangedMeanwhile(const std::string& name) {
  return absl::AbortedError(
      absl::StrCat("model '", name, "' was declared, reset or dropped in the meantime; try again"));
}

using internal::v1::LogRecord;

LogRecord ModelRemovedRecord(uint64_t model_id) {
  LogRecord record;
  record.mutable_model_removed()->set_model_id(model_id);
  return record;
}

// `limits`: of a model that is served already; null: it is served from now on.
LogRecord ModelServedRecord(uint64_t model_id, const internal::v1::ModelLimits* limits) {
  LogRecord record;
  record.mutable_model_served()->set_model_id(model_id);
  if (limits != nullptr) *record.mutable_model_served()->mutable_limits() = *limits;
  return record;
}

LogRecord ModelPinnedRecord(uint64_t model_id, bool pinned) {
  LogRecord record;
  record.mutable_model_pinned()->set_model_id(model_id);
  record.mutable_model_pinned()->set_pinned(pinned);
  return record;
}

LogRecord ModelRenewedRecord(uint64_t model_id, uint64_t history) {
  LogRecord record;
  record.mutable_model_renewed()->set_model_id(model_id);
  record.mutable_model_renewed()->set_history(history);
  return record;
}

LogRecord HistoryDroppedRecord(uint64_t history) {
  LogRecord record;
  record.mutable_history_dropped()->set_history(history);
  return record;
}

}  // namespace

shard::ModelSpec ModelSpecFromPlan(uint64_t model_id, const v1::ModelConfig& config,
                                   const preprocess::Plan& plan, int shard_index) {
  shard::ModelSpec spec;
  spec.model_id = model_id;
  spec.name = config.name();
  spec.seed = config.seed();
  spec.partitions = plan.topology.partitions();
  spec.partition_count = plan.topology.sparsecores_per_shard;
  spec.first_partition = shard_index * spec.partition_count;
  for (const preprocess::StackPlan& stack_plan : plan.stacks) {
    shard::StackSpec stack;
    stack.name = stack_plan.name;
    stack.embedding_dim = stack_plan.embedding_dim;
    stack.rows_per_partition = stack_plan.rows_per_partition;
    for (const preprocess::TablePlan& table_plan : stack_plan.tables) {
      const v1::TableConfig& table = config.tables(table_plan.table);
      stack.tables.push_back({.name = table_plan.name,
                              .vocabulary_size = table_plan.vocabulary_size,
                              .padded_vocabulary_size = table_plan.padded_vocabulary_size,
                              .embedding_dim = table_plan.embedding_dim,
                              .row_offset = table_plan.row_offset,
                              .shard_rotation = table_plan.shard_rotation,
                              .initializer = table.initializer(),
                              .seed_name = config::SeedName(config, table)});
    }
    // Tables of a stack agree on these.
    const v1::TableConfig& first = config.tables(stack_plan.tables.front().table);
    stack.optimizer = first.optimizer();
    stack.storage_dtype = first.storage_dtype();
    stack.stochastic_rounding = first.update_rounding() == v1::STOCHASTIC;
    stack.skip_nonfinite = first.on_nonfinite_gradient() == v1::SKIP_ROW;
    stack.result_mode = first.result_mode();
    stack.quantized = first.has_quantization();
    stack.quantization = first.quantization();
    if (config::IsShared(first)) stack.resource = config::ResourceText(first.resource());
    spec.stacks.push_back(std::move(stack));
  }
  return spec;
}

absl::Status HostedModels::CheckPlace(const internal::v1::CreateModelRequest& request) const {
  if (request.shards() == place_.shards &&
      request.sparsecores_per_shard() == place_.sparsecores_per_shard &&
      request.shard_index() == place_.index) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "this process is configured as shard ", place_.index, " of ", place_.shards, " with ",
      place_.sparsecores_per_shard, " SparseCores each; its log or coordinator takes it for shard ",
      request.shard_index(), " of ", request.shards(), " with ", request.sparsecores_per_shard(),
      "; all processes need one description, with as many partitions as their logs have"));
}

const HostedModels::Model* HostedModels::FindEntry(uint64_t model_id, uint64_t history) const {
  for (const bool serves : {false, true}) {
    const auto found = models_.find(EngineId(model_id, history, serves));
    if (found == models_.end()) continue;
    const Model& model = found->second;
    if (model.model_id() == model_id && model.history() == history) return &model;
  }
  return nullptr;
}

absl::Status HostedModels::FindPlaceBeside(const internal::v1::CreateModelRequest& request) const {
  const std::string& name = request.config().name();
  uint64_t served = 0;
  int64_t newest = -1;
  int here = 0;
  for (const auto& [id, model] : models_) {
    if (model.config().name() != name) continue;
    ++here;
    if (model.serves().model().empty() || model.model_id() != request.model_id()) {
      return absl::AlreadyExistsError(absl::StrCat(
          "another model '", name, "' is declared here, with model_id ", HexId(model.model_id())));
    }
    if (!model.serving || model.serves().version() <= newest) continue;
    newest = model.serves().version();
    served = model.history();
  }
  return here <= 1 && served == request.replaces() ? absl::OkStatus() : ChangedMeanwhile(name);
}

absl::StatusOr<HostedModels::Place> HostedModels::FindPlace(
    const internal::v1::CreateModelRequest& request, bool initial_rows) {
  const std::string& name = request.config().name();
  const ShardLog::Stay stay(log_);
  absl::MutexLock lock(&mutex_);
  // The word that takes rows back may be faster than the one that makes them.
  if (absl::c_linear_search(dropped_, request.history())) {
    return absl::AbortedError(
        absl::StrCat("the declaration of model '", name, "' has been undone already; try again"));
  }
  if (FindEntry(request.model_id(), request.history()) != nullptr) return Place{.done = true};
  if (request.has_serves()) {
    RETURN_IF_ERROR(FindPlaceBeside(request));
    return Place();
  }
  const auto found = std::find_if(models_.begin(), models_.end(), [&](const auto& entry) {
    return entry.second.config().name() == name;
  });
  const uint64_t here = found == models_.end() ? 0 : found->second.history();
  const bool trained = here != 0 && found->second.serves().model().empty();
  const bool same = trained && found->first == request.model_id();
  if (here != 0 && !same && (found->second.serving || !trained)) {
    return absl::AlreadyExistsError(absl::StrCat("another model '", name,
                                                 "' is declared here, with model_id ",
                                                 HexId(found->second.model_id())));
  }
  if (here != request.replaces()) return ChangedMeanwhile(name);
  if (initial_rows && same && !found->second.serving && !found->second.restored &&
      !config::HasAssignedTable(request.config()) && !config::HasSharedTables(request.config())) {
    // Its rows are as good as new ones.
    RETURN_IF_ERROR(log_->Append(ModelRenewedRecord(found->first, request.history())));
    found->second.create.set_history(request.history());
    return Place{.done = true};
  }
  // If a restore comes to nothing, what was here is lost, and that must be said.
  if (here != 0 && initial_rows) {
    RETURN_IF_ERROR(log_->Append(HistoryDroppedRecord(here)));
    RememberDropped(here);
  }
  return Place{.occupant = here == 0 ? 0 : found->first};
}

absl::StatusOr<preprocess::Plan> HostedModels::CheckRequest(
    const internal::v1::CreateModelRequest& request) const {
  RETURN_IF_ERROR(CheckPlace(request));
  if (request.history() == 0) return absl::InvalidArgumentError("history is 0; it must be random");
  const v1::ModelConfig& config = request.config();
  ASSIGN_OR_RETURN(
      preprocess::Plan plan,
      preprocess::MakePlan(config, {.shards = place_.shards,
                                    .sparsecores_per_shard = place_.sparsecores_per_shard}));
  if (plan.fingerprint == request.plan_fingerprint()) return plan;
  return absl::FailedPreconditionError(
      absl::StrCat("model '", config.name(), "' is planned differently here (fingerprint ",
                   plan.fingerprint, ") and by the coordinator (", request.plan_fingerprint(),
                   "): do both run the same version of emberd?"));
}

HostedModels::Model HostedModels::MakeEntry(const internal::v1::CreateModelRequest& request,
                                            const preprocess::Plan& plan) const {
  std::vector<std::string> stacks;
  for (const preprocess::StackPlan& stack : plan.stacks) stacks.push_back(stack.name);
  Model model;
  model.create = request;
  model.metrics = metrics_->ShardModel(place_.index, request.config().name(), stacks);
  return model;
}

absl::StatusOr<internal::v1::CreateModelResponse> HostedModels::Create(
    internal::v1::CreateModelRequest request) {
  if (request.has_serves()) {
    return absl::InvalidArgumentError(
        "serves is set: such a model takes its rows from a checkpoint");
  }
  ASSIGN_OR_RETURN(const preprocess::Plan plan, CheckRequest(request));
  absl::MutexLock changing(&changing_);
  ASSIGN_OR_RETURN(*request.mutable_shared_with(), CheckShared(request, /*initial_rows=*/true));
  ASSIGN_OR_RETURN(const Place place, FindPlace(request, /*initial_rows=*/true));
  internal::v1::CreateModelResponse response;
  response.set_created(!place.done);
  response.set_shared_with(request.shared_with());
  if (place.done) return response;
  if (place.occupant != 0) RETURN_IF_ERROR(Remove(place.occupant));
  RETURN_IF_ERROR(engine_->CreateModel(
      ModelSpecFromPlan(request.model_id(), request.config(), plan, place_.index)));
  Model model = MakeEntry(request, plan);
  {
    const ShardLog::Stay stay(log_);
    LogRecord made;
    *made.mutable_model_made()->mutable_create() = request;
    if (absl::Status logged = log_->Append(made); !logged.ok()) {
      engine_->DropModel(request.model_id()).IgnoreError();
      return logged;
    }
    absl::MutexLock lock(&mutex_);
    model.rows.set_segment(OldestOfShared(model.config(), log_->segment()));
    models_[request.model_id()] = std::move(model);
  }
  PinIfCreatedSo(request.model_id());
  return response;
}

absl::StatusOr<shard::ModelSpec> HostedModels::BeginRestore(
    const internal::v1::CreateModelRequest& request) {
  ASSIGN_OR_RETURN(const preprocess::Plan plan, CheckRequest(request));
  absl::MutexLock changing(&changing_);
  RETURN_IF_ERROR(CheckShared(request, /*initial_rows=*/false).status());
  ASSIGN_OR_RETURN(const Place place, FindPlace(request, /*initial_rows=*/false));
  if (place.done) {
    return absl::AlreadyExistsError(absl::StrCat("the rows of history ", HexId(request.history()),
                                                 " are here, or being restored, already"));
  }
  if (place.occupant != 0) RETURN_IF_ERROR(Remove(place.occupant));
  Model model = MakeEntry(request, plan);
  model.restored = true;
  model.loading = true;
  absl::MutexLock lock(&mutex_);
  models_[EngineId(request)] = std::move(model);
  return ModelSpecFromPlan(EngineId(request), request.config(), plan, place_.index);
}

absl::Status HostedModels::EndRestore(const internal::v1::LogModelMade& made,
                                      std::shared_ptr<shard::Model> model, int64_t changes,
                                      uint64_t checkpoint_id, const Rest& rest) {
  const internal::v1::CreateModelRequest& request = made.create();
  absl::MutexLock changing(&changing_);
  {
    absl::MutexLock lock(&mutex_);
    if (FindEntry(request.model_id(), request.history()) == nullptr) {
      return absl::AbortedError(
          "the model was declared, reset, restored or dropped in the meantime");
    }
  }
  RETURN_IF_ERROR(engine_->AddModel(std::move(model)));
  std::function<void()> after = [] {};
  const absl::Status recorded = RecordRestore(made, changes, checkpoint_id, rest, &after);
  after();
  RETURN_IF_ERROR(recorded);
  PinIfCreatedSo(EngineId(request));
  return absl::OkStatus();
}

absl::Status HostedModels::RecordRestore(const internal::v1::LogModelMade& made, int64_t changes,
                                         uint64_t checkpoint_id, const Rest& rest,
                                         std::function<void()>* after) {
  const internal::v1::CreateModelRequest& request = made.create();
  const ShardLog::Stay stay(log_);
  const absl::MutexLock order(&order_->mutex);
  // Models that serve a checkpoint get it again from coordinators, without a log.
  if (!request.has_serves()) {
    LogRecord record;
    *record.mutable_model_made() = made;
    {
      absl::MutexLock lock(&mutex_);  // it may have been pinned since
      const bool pinned = models_[EngineId(request)].create.pinned();
      record.mutable_model_made()->mutable_create()->set_pinned(pinned);
    }
    if (absl::Status logged = log_->Append(record); !logged.ok()) {
      engine_->DropModel(request.model_id()).IgnoreError();
      return logged;
    }
    *after = rest();
  }
  absl::MutexLock lock(&mutex_);
  Model& entry = models_[EngineId(request)];
  entry.rows.set_segment(log_->segment());
  entry.rows.set_checkpoint_id(made.checkpoint_id());
  entry.rows.set_model(made.checkpoint_model());
  entry.loading = false;
  entry.changes = changes;
  // What has changed since is not known of rows that others change.
  entry.checkpoint_id = config::HasSharedTables(entry.config()) ? 0 : checkpoint_id;
  return absl::OkStatus();
}

void HostedModels::Abandon(uint64_t model_id, uint64_t history) {
  absl::MutexLock changing(&changing_);
  uint64_t engine_id = 0;
  {
    absl::MutexLock lock(&mutex_);
    const Model* const found = FindEntry(model_id, history);
    if (found == nullptr || found->serving) return;
    engine_id = EngineId(model_id, history, !found->is_trained());
  }
  Remove(engine_id).IgnoreError();  // without it in the log, it comes back and is not served
}

void HostedModels::AbandonRestored() {
  if (place_.index != 0) return;
  std::vector<std::pair<uint64_t, uint64_t>> left;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [id, model] : models_) {
      if (model.restored && !model.serving) left.emplace_back(model.model_id(), model.history());
    }
  }
  for (const auto& [model_id, history] : left) {
    ops::Log(ops::LogLevel::kWarning,
             "a restore that was not finished before a restart is given up",
             {{"model_id", HexId(model_id)}});
    Abandon(model_id, history);
  }
}

void HostedModels::AddChange(uint64_t model_id) {
  absl::MutexLock lock(&mutex_);
  const auto found = models_.find(model_id);
  if (found != models_.end()) ++found->second.changes;
}

HostedModels::Facts HostedModels::FactsOf(uint64_t model_id) const {
  absl::MutexLock lock(&mutex_);
  const auto found = models_.find(model_id);
  if (found == models_.end()) return {};
  const Model& model = found->second;
  return {model.history(), model.changes, model.checkpoint_id, model.metrics};
}

absl::Status HostedModels::SetCheckpoints(absl::Span<const internal::v1::BeginSaveRequest> saves,
                                          uint64_t segment) {
  const ShardLog::Stay stay(log_);
  absl::MutexLock lock(&mutex_);
  LogRecord record;
  for (const internal::v1::BeginSaveRequest& save : saves) {
    const auto found = models_.find(save.model_id());
    if (found == models_.end() || found->second.history() != save.history()) continue;
    Model& model = found->second;
    // What has changed since is not known of rows that others change.
    if (!config::HasSharedTables(model.config())) model.checkpoint_id = save.checkpoint_id();
    internal::v1::LogCheckpoint* const made = record.mutable_checkpoints()->add_made();
    made->set_model_id(save.model_id());
    made->set_history(save.history());
    made->set_checkpoint_id(save.checkpoint_id());
    made->set_segment(segment);
  }
  if (record.checkpoints().made().empty()) {
    return absl::NotFoundError("the model was reset, restored or dropped in the meantime");
  }
  if (segment == 0) return absl::OkStatus();
  // Without it in the log, what came before must stay there.
  RETURN_IF_ERROR(log_->Append(record));
  for (const internal::v1::LogCheckpoint& made : record.checkpoints().made()) {
    Model& model = models_[made.model_id()];
    model.rows.set_segment(segment);
    model.rows.set_checkpoint_id(made.checkpoint_id());
    model.rows.set_model(model.config().name());
  }
  return absl::OkStatus();
}

absl::Status HostedModels::Serve(const internal::v1::ServeModelRequest& request) {
  const ShardLog::Stay stay(log_);
  absl::MutexLock lock(&mutex_);
  const Model* const found = FindEntry(request.model_id(), request.history());
  if (found == nullptr || found->loading) {
    return absl::AbortedError("the model was declared, reset or dropped meanwhile; try again");
  }
  Model& entry = models_[EngineId(request.model_id(), request.history(), !found->is_trained())];
  if (request.has_limits()) return SetLimits(request.limits(), &entry);
  if (entry.serving) {
    entry.returned = false;
    return absl::OkStatus();
  }
  if (entry.is_trained()) {
    RETURN_IF_ERROR(log_->Append(ModelServedRecord(request.model_id(), /*limits=*/nullptr)));
  }
  // Of rows that these follow, the limits may have been changed while these were loaded.
  for (const auto& [id, before] : models_) {
    if (before.model_id() != entry.model_id() || !before.serving) continue;
    if (before.create.limits().version() <= entry.create.limits().version()) continue;
    *entry.create.mutable_limits() = before.create.limits();
  }
  entry.serving = true;
  return absl::OkStatus();
}

absl::Status HostedModels::SetLimits(const internal::v1::ModelLimits& limits, Model* model) {
  if (!model->serving || limits.version() != model->create.limits().version() + 1) {
    return absl::AbortedError(absl::StrCat("the limits of model '", model->config().name(),
                                           "' were changed in the meantime; try again"));
  }
  if (model->is_trained()) {
    RETURN_IF_ERROR(log_->Append(ModelServedRecord(model->model_id(), &limits)));
  }
  // Newer rows may be served here already, and not yet by all shards.
  for (auto& [id, rows] : models_) {
    if (rows.model_id() != model->model_id() || !rows.serving) continue;
    if (rows.create.limits().version() < limits.version()) *rows.create.mutable_limits() = limits;
  }
  return absl::OkStatus();
}

absl::StatusOr<internal::v1::FindModelResponse> HostedModels::Find(
    const internal::v1::FindModelRequest& request) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [id, model] : models_) {
    const bool found = request.model_id() != 0 ? model.model_id() == request.model_id()
                                               : model.config().name() == request.name();
    if (!found) continue;
    internal::v1::FindModelResponse response;
    response.set_model_id(model.model_id());
    *response.mutable_config() = model.config();
    return response;
  }
  return absl::NotFoundError("no such model is declared here");
}

internal::v1::ListModelsResponse HostedModels::List() const {
  internal::v1::ListModelsResponse response;
  const std::optional<uint64_t> oldest = OldestSegment();
  absl::MutexLock lock(&mutex_);
  for (const auto& [id, model] : models_) {
    internal::v1::HostedModel* to = response.add_models();
    to->set_model_id(model.model_id());
    to->set_name(model.config().name());
    to->set_history(model.history());
    to->set_serving(model.serving);
    to->set_restored(model.restored);
    to->set_changes(model.changes);
    if (!model.serves().model().empty()) *to->mutable_serves() = model.serves();
    if (model.create.has_limits()) *to->mutable_limits() = model.create.limits();
    to->set_pinned(model.create.pinned());
    to->set_damage(std::string(engine_->DamageOf(id).message()));
    to->set_returned(model.returned);
    to->set_pins_log(log_->IsLong() && model.is_trained() && !model.loading &&
                     model.rows.segment() == oldest && !MayMove(id, model));
  }
  response.mutable_dropped()->Add(dropped_.begin(), dropped_.end());
  return response;
}

absl::Status HostedModels::Drop(const internal::v1::DropModelRequest& request) {
  absl::MutexLock changing(&changing_);
  uint64_t engine_id = 0;
  {
    const ShardLog::Stay stay(log_);
    absl::MutexLock lock(&mutex_);
    const Model* const found = FindEntry(request.model_id(), request.history());
    if (found != nullptr && found->serving && request.unless_serving()) {
      return absl::FailedPreconditionError("the model is served");
    }
    const auto other = [&](const auto& entry) {
      return &entry.second != found && entry.second.model_id() == request.model_id() &&
             entry.second.serving;
    };
    if (request.unless_only() && std::none_of(models_.begin(), models_.end(), other)) {
      return absl::FailedPreconditionError("no other rows of the model are served");
    }
    RETURN_IF_ERROR(log_->Append(HistoryDroppedRecord(request.history())));
    RememberDropped(request.history());
    if (found == nullptr) return absl::OkStatus();
    engine_id = EngineId(request.model_id(), request.history(), !found->is_trained());
  }
  return Remove(engine_id);
}

absl::Status HostedModels::Remove(uint64_t engine_id) {
  std::function<void()> forgotten = [] {};
  std::shared_ptr<shard::Model> rows;  // their memory goes without the locks
  bool in_log = false;
  {
    const ShardLog::Stay stay(log_);
    // A change that is decided after the record must not be made: the log would not make it again,
    // and models that share a table would miss it.
    const absl::MutexLock order(&order_->mutex);
    absl::MutexLock lock(&mutex_);
    const auto found = models_.find(engine_id);
    if (found == models_.end()) return absl::OkStatus();
    const bool trained = found->second.is_trained();
    in_log = trained && !found->second.loading;
    if (in_log) RETURN_IF_ERROR(log_->Append(ModelRemovedRecord(engine_id)));
    const internal::v1::LogRows& removed = found->second.rows;
    bool rows_stay = false;
    for (const auto& [id, other] : models_) {
      if (config::CommonResource(other.config(), found->second.config()).empty()) continue;
      rows_stay |= id != engine_id;
      log_->NoteChange(id, log_->LastChange(engine_id).value_or(0));
      // Who has joined since has the shared rows of that checkpoint, which the log alone names.
      const bool joined = other.rows.checkpoint_id() == 0 && removed.checkpoint_id() != 0;
      if (joined) log_->NoteChange(id, removed.segment());
    }
    models_.erase(found);
    // None of it is there while a restore loads it.
    if (auto taken = engine_->TakeModel(engine_id); taken.ok()) rows = *std::move(taken);
    if (trained) forgotten = forget_(engine_id, rows_stay);
  }
  forgotten();
  // The checkpoint that its rows go on from may be deleted as soon as somebody hears of this; also
  // who drops it once more does not before.
  return in_log ? log_->Sync() : absl::OkStatus();
}

void HostedModels::RememberDropped(uint64_t history) {
  if (absl::c_linear_search(dropped_, history)) return;
  dropped_.push_back(history);
  if (dropped_.size() > kMaxDropped) dropped_.pop_front();
}

absl::StatusOr<HostedModels::Rows> HostedModels::FindRows(uint64_t model_id, uint64_t history,
                                                          bool unserved) const {
  absl::MutexLock lock(&mutex_);
  const Model* const found = FindEntry(model_id, history);
  if (found != nullptr && found->returned && (found->serving || !unserved)) {
    return absl::UnavailableError(
        absl::StrCat("model '", found->config().name(),
                     "' has come back from the log; a coordinator compares it with the other "
                     "shards first; retry"));
  }
  if (found != nullptr && (found->serving || unserved)) {
    const bool serves = !found->is_trained();
    return Rows{EngineId(model_id, history, serves), serves, found->metrics};
  }
  return absl::DataLossError(absl::StrCat("it does not have the rows of model_id ", HexId(model_id),
                                          " that the call is about"));
}

// Models that share tables with others on their shard.

absl::StatusOr<std::string> HostedModels::CheckShared(
    const internal::v1::CreateModelRequest& request, bool initial_rows) const {
  const v1::ModelConfig& config = request.config();
  if (!config::HasSharedTables(config)) return "";
  if (request.has_serves()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model '", config.name(), "' serves a checkpoint, but has a table with a resource"));
  }
  absl::MutexLock lock(&mutex_);
  const auto found = models_.find(request.model_id());
  const Model* const here = found == models_.end() ? nullptr : &found->second;
  // Where it was made before, its rows may have been changed by others who are gone.
  if (here != nullptr && here->history() == request.history()) return here->create.shared_with();
  const bool resets = here != nullptr && here->serving;
  std::set<std::string> shared_with;
  for (const auto& [id, other] : models_) {
    // What is here under its name goes first, or it is refused for that.
    if (other.config().name() == config.name()) continue;
    const std::string resource = config::CommonResource(other.config(), config);
    if (resource.empty()) continue;
    if (!initial_rows || resets) RETURN_IF_ERROR(config::CheckAlone(other.config(), config));
    RETURN_IF_ERROR(config::CheckSameShared(other.config(), config));
    shared_with.insert(absl::StrCat(other.config().name(), " ", HexId(other.history())));
    if (!other.loading) continue;
    return absl::UnavailableError(absl::StrCat("model '", other.config().name(),
                                               "', which holds resource '", resource,
                                               "', is being restored; retry"));
  }
  return absl::StrJoin(shared_with, ", ");
}

uint64_t HostedModels::OldestOfShared(const v1::ModelConfig& config, uint64_t segment) const {
  for (const auto& [id, other] : models_) {
    if (config::CommonResource(other.config(), config).empty()) continue;
    segment = std::min(segment, other.rows.segment());
  }
  return segment;
}

absl::Status HostedModels::CheckHolders(absl::Span<const uint64_t> model_ids) const {
  if (!log_->on()) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  for (const uint64_t id : model_ids) {
    const auto saved = models_.find(id);
    if (saved == models_.end()) continue;
    for (const auto& [other_id, other] : models_) {
      const std::string resource = config::CommonResource(other.config(), saved->second.config());
      if (resource.empty() || absl::c_linear_search(model_ids, other_id)) continue;
      if (!other.serving) continue;  // nobody can save it, and its log stays where it begins
      return absl::AbortedError(absl::StrCat("model '", other.config().name(),
                                             "', which holds resource '", resource,
                                             "', too, is not saved at this moment; try again"));
    }
  }
  return absl::OkStatus();
}

// Models that an operator keeps in the memory of the SparseCores: the memory manager does it, and
// here it is remembered for as long as the model is here.

absl::Status HostedModels::RecordPinned(const std::string& name, bool pinned) {
  const ShardLog::Stay stay(log_);
  absl::MutexLock lock(&mutex_);
  for (auto& [id, model] : models_) {
    if (model.config().name() != name || model.create.pinned() == pinned) continue;
    if (model.is_trained()) RETURN_IF_ERROR(log_->Append(ModelPinnedRecord(id, pinned)));
    model.create.set_pinned(pinned);
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::ShardMemoryChange> HostedModels::SetPinned(const std::string& name,
                                                              bool pinned) {
  shard::MemoryManager* const memory = engine_->memory();
  absl::MutexLock changing(&changing_);
  ASSIGN_OR_RETURN(v1::ShardMemoryChange change, memory->SetPinned(name, pinned));
  if (const absl::Status recorded = RecordPinned(name, pinned); !recorded.ok()) {
    if (change.changed()) memory->SetPinned(name, !pinned).IgnoreError();
    return recorded;
  }
  return change;
}

void HostedModels::PinIfCreatedSo(uint64_t engine_id) {
  std::string name;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = models_.find(engine_id);
    if (found == models_.end() || !found->second.create.pinned()) return;
    name = found->second.config().name();
  }
  if (engine_->memory() == nullptr) return;
  const absl::Status pinned = engine_->memory()->SetPinned(name, true).status();
  if (pinned.ok()) return;
  ops::Log(ops::LogLevel::kWarning, "a model that was pinned is not pinned any more",
           {{"model", name}, {"shard", place_.index}, {"reason", pinned.message()}});
  RecordPinned(name, false).IgnoreError();  // a log that cannot be written to says so itself
}

void HostedModels::PinAgain() {
  // By name, so that all shards give up the same ones.
  std::map<std::string, uint64_t> ids;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [id, model] : models_) ids[model.config().name()] = id;
  }
  for (const auto& [name, id] : ids) PinIfCreatedSo(id);
}

// What the log keeps of the models on a shard, and how they come back.

bool HostedModels::MayMove(uint64_t model_id, const Model& model) const {
  // Those that share its rows change them, too; Remove has noted what others did that are gone.
  return std::all_of(models_.begin(), models_.end(), [&](const auto& entry) {
    const bool changes_rows =
        entry.first == model_id ||
        !config::CommonResource(entry.second.config(), model.config()).empty();
    return !changes_rows || log_->LastChange(entry.first).value_or(0) < model.rows.segment();
  });
}

void HostedModels::Describe(uint64_t segment, internal::v1::LogState* state) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [id, model] : models_) {
    if (model.loading || !model.is_trained()) continue;
    internal::v1::LogModel* to = state->add_models();
    *to->mutable_create() = model.create;
    to->set_serving(model.serving);
    *to->mutable_rows() = model.rows;
    if (MayMove(id, model)) to->mutable_rows()->set_segment(segment);
  }
  state->mutable_dropped_histories()->Add(dropped_.begin(), dropped_.end());
}

void HostedModels::SegmentBegun(uint64_t segment) {
  absl::MutexLock lock(&mutex_);
  for (auto& [id, model] : models_) {
    if (model.loading || !model.is_trained()) continue;
    if (MayMove(id, model)) {
      // The record that changes it may be on its way into the new segment: that is early enough.
      model.rows.set_segment(segment);
    } else if (!model.serving && log_->IsLong()) {  // others are saved
      ops::Log(ops::LogLevel::kWarning,
               "the log stays long for a model that does not have all its first rows; if the "
               "client that declared it is gone, declare it again, or drop it",
               {{"model", model.config().name()}, {"shard", place_.index}});
    }
  }
}

std::optional<uint64_t> HostedModels::OldestSegment() const {
  absl::MutexLock lock(&mutex_);
  std::optional<uint64_t> oldest;
  for (const auto& [id, model] : models_) {
    if (model.loading || !model.is_trained()) continue;
    oldest = std::min(oldest.value_or(model.rows.segment()), model.rows.segment());
  }
  return oldest;
}

absl::Status HostedModels::Remember(const internal::v1::LogModel& from,
                                    std::shared_ptr<shard::Model> model, int64_t changes,
                                    uint64_t tracked) {
  ASSIGN_OR_RETURN(const preprocess::Plan plan, CheckRequest(from.create()));
  const uint64_t id = from.create().model_id();
  if (model != nullptr) {
    RETURN_IF_ERROR(engine_->AddModel(std::move(model)));
  } else {
    RETURN_IF_ERROR(
        engine_->CreateModel(ModelSpecFromPlan(id, from.create().config(), plan, place_.index)));
  }
  Model entry = MakeEntry(from.create(), plan);
  entry.serving = from.serving();
  entry.returned = place_.shards > 1;
  entry.rows = from.rows();
  entry.changes = changes;
  entry.checkpoint_id = config::HasSharedTables(entry.config()) ? 0 : tracked;
  entry.restored = from.rows().checkpoint_id() != 0;
  absl::MutexLock lock(&mutex_);
  if (!entry.restored) {
    entry.rows.set_segment(OldestOfShared(entry.config(), entry.rows.segment()));
  }
  models_[id] = std::move(entry);
  return absl::OkStatus();
}

absl::StatusOr<shard::ModelSpec> HostedModels::SpecOf(
    const internal::v1::CreateModelRequest& request) const {
  ASSIGN_OR_RETURN(const preprocess::Plan plan, CheckRequest(request));
  return ModelSpecFromPlan(request.model_id(), request.config(), plan, place_.index);
}

void HostedModels::Replay(const LogRecord& record) {
  absl::MutexLock lock(&mutex_);
  const uint64_t model_id = record.has_model_served()   ? record.model_served().model_id()
                            : record.has_model_pinned() ? record.model_pinned().model_id()
                                                        : record.model_renewed().model_id();
  const auto found = models_.find(model_id);
  if (found == models_.end()) return;
  internal::v1::CreateModelRequest& create = found->second.create;
  if (record.has_model_served()) found->second.serving = true;
  if (record.model_served().has_limits()) *create.mutable_limits() = record.model_served().limits();
  if (record.has_model_pinned()) create.set_pinned(record.model_pinned().pinned());
  if (record.has_model_renewed()) create.set_history(record.model_renewed().history());
}

void HostedModels::RememberDroppedHistory(uint64_t history) {
  absl::MutexLock lock(&mutex_);
  RememberDropped(history);
}

}  // namespace emberd::host
