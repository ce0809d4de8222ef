#include "server/coordinator/model_registry.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/suggest.h"
#include "config/config.h"
#include "config/fields.h"
#include "config/shared_tables.h"
#include "server/ops/logging.h"

namespace emberd::coordinator {
namespace {

// How often a change begins again after another one has come between.
constexpr int kAttempts = 8;
constexpr absl::Duration kPause = absl::Milliseconds(50);
constexpr absl::Duration kExplainDeadline = absl::Seconds(2);
constexpr absl::Duration kWatchDeadline = absl::Seconds(1);

absl::Status NotDeclared(uint64_t model_id) {
  return absl::NotFoundError(
      absl::StrCat("model_id ", HexId(model_id), " is not declared; call DeclareModel"));
}

absl::Status BeingRestored(const v1::ModelConfig& config) {
  return absl::UnavailableError(
      absl::StrCat("model '", config.name(), "' is being restored from a checkpoint; retry"));
}

// So long shards keep rows that others have followed: coordinators hear of these within a second or
// two, and calls that began on the old rows end on them.
constexpr absl::Duration kFollowedPatience = absl::Seconds(5);
constexpr absl::Duration kUnserveDeadline = absl::Seconds(2);

std::string LimitsText(const internal::v1::ModelLimits& limits) {
  return absl::StrJoin(limits.stacks(), ", ", [](std::string* out, const v1::StackLimit& stack) {
    absl::StrAppend(out, stack.stack(), " ", stack.max_ids_per_partition(), "/",
                    stack.max_unique_ids_per_partition(), "/", stack.max_ids_per_chip_per_sample(),
                    "/", stack.max_minibatches_per_sparsecore());
  });
}

// What a request makes of the limits of now: one for each stack, in plan order. INVALID_ARGUMENT
// names the stack.
absl::StatusOr<std::vector<v1::StackLimit>> ChangedLimits(const step::ServedModel& model,
                                                          const preprocess::Plan& now,
                                                          const v1::SetLimitsRequest& request) {
  const preprocess::Plan& from = request.declared() ? model.plan : now;
  std::vector<v1::StackLimit> limits;
  std::vector<std::string> names;
  for (const preprocess::StackPlan& stack : from.stacks) {
    v1::StackLimit& limit = limits.emplace_back();
    limit.set_stack(stack.name);
    preprocess::WriteLimits(stack.limits, &limit);
    names.push_back(stack.name);
  }
  std::vector<bool> given(limits.size());
  for (int i = 0; i < request.limits_size(); ++i) {
    const v1::StackLimit& wanted = request.limits(i);
    const std::string at = absl::StrCat("limits[", i, "]");
    size_t k = 0;
    while (k < names.size() && names[k] != wanted.stack()) ++k;
    if (k == names.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat(at, ".stack is '", wanted.stack(), "', which model '", model.config.name(),
                       "' does not have; ", KnownNames("stacks", wanted.stack(), names)));
    }
    if (given[k]) {
      return absl::InvalidArgumentError(
          absl::StrCat(at, ".stack '", wanted.stack(), "' is repeated"));
    }
    given[k] = true;
    RETURN_IF_ERROR(config::CheckFields(wanted, at));
    // An absent capacity stays; the other two are 0 then.
    limits[k].clear_max_ids_per_partition();
    limits[k].clear_max_unique_ids_per_partition();
    limits[k].MergeFrom(wanted);
  }
  return limits;
}

}  // namespace

ModelRegistry::ModelRegistry(const step::ShardSet& shards, ModelRegistryOptions options)
    : shards_(shards),
      options_(options),
      changes_(shards_, options.topology, &options.threads->blocking) {}

// ---- What is known

ModelRegistry::Known ModelRegistry::Recall(uint64_t model_id) const {
  absl::MutexLock lock(&mutex_);
  const auto found = models_.find(model_id);
  return found == models_.end() ? Known() : found->second;
}

uint64_t ModelRegistry::IdOf(const std::string& name) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [id, entry] : models_) {
    if (entry.model->config.name() == name) return id;
  }
  return 0;
}

void ModelRegistry::Remember(step::ServedModelPtr model) {
  absl::MutexLock lock(&mutex_);
  absl::erase_if(models_, [&](auto& entry) {
    if (entry.second.model->config.name() != model->config.name()) return false;
    entry.second.SetLost("");
    return true;
  });
  const uint64_t id = model->id;
  models_[id].model = std::move(model);
}

void ModelRegistry::Forget(uint64_t model_id) {
  absl::MutexLock lock(&mutex_);
  const auto found = models_.find(model_id);
  if (found == models_.end()) return;
  found->second.SetLost("");
  models_.erase(found);
}

void ModelRegistry::SetLost(uint64_t model_id, const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  const auto found = models_.find(model_id);
  if (found == models_.end()) return;
  Known& entry = found->second;
  if (entry.lost.empty() != why.ok()) {
    ops::Log(why.ok() ? ops::LogLevel::kInfo : ops::LogLevel::kError,
             why.ok() ? "a lost model has its rows again" : "a model is lost",
             {{"model", entry.model->config.name()}, {"reason", why.message()}});
  }
  entry.SetLost(std::string(why.message()));
  entry.doubted = !why.ok();
}

std::vector<ModelRegistry::Known> ModelRegistry::models() const {
  absl::MutexLock lock(&mutex_);
  std::vector<Known> models;
  for (const auto& [id, entry] : models_) models.push_back(entry);
  std::sort(models.begin(), models.end(), [](const Known& a, const Known& b) {
    return a.model->config.name() < b.model->config.name();
  });
  return models;
}

// ---- What the shards have

absl::Status ModelRegistry::LostError(const step::ServedModel& model,
                                      const ModelVerdict& verdict) const {
  const std::string& name = model.config.name();
  const auto shard_name = [this](std::string* out, int shard) {
    absl::StrAppend(out, shards_[shard].name());
  };
  const std::string remedy =
      model.read_only()
          ? absl::StrCat("`emberctl serve ", model.serves.model(), " ", model.serves.checkpoint(),
                         " --as ", name, "` loads them again")
          : absl::StrCat("`emberctl checkpoint restore ", name,
                         "` goes back to a checkpoint, if there is one, `emberctl model reset ",
                         name, "` gives all shards initial rows again");
  const std::string shards = absl::StrJoin(verdict.without, ", ", shard_name);
  std::string reason = absl::StrCat(
      shards, verdict.without.size() == 1 ? " no longer has its" : " no longer have their",
      " rows, as after a restart");
  if (!verdict.damage.empty()) {
    reason = absl::StrCat(shards, ": ", verdict.damage,
                          "; with storage.durability LOG, a shard that is started again has them "
                          "from its log");
  }
  if (!verdict.lost_change.empty()) {
    reason =
        absl::StrCat(verdict.lost_change,
                     ": a loss of power, or an older copy of the log, took the newest changes");
  }
  return absl::DataLossError(absl::StrCat("model '", name, "' is lost: ", reason, "; ", remedy,
                                          ", `emberctl model drop ", name, "` removes the model"));
}

ModelVerdict ModelRegistry::Judge(uint64_t model_id, uint64_t known, ShardModels* shards,
                                  rpc::CallContext* context) {
  ModelVerdict verdict = shards->Judge(model_id, known);
  if (verdict.state != ModelState::kLost) return verdict;
  // Shards do not answer at one moment: a model that is just being made or dropped may look so.
  absl::SleepFor(kPause);
  *shards = changes_.Ask(context);
  ModelVerdict again = shards->Judge(model_id, known);
  return again.state == ModelState::kUnknown ? verdict : again;
}

absl::StatusOr<std::shared_ptr<step::ServedModel>> ModelRegistry::MakeModel(
    v1::ModelConfig config, uint64_t history) const {
  ASSIGN_OR_RETURN(auto model, step::MakeServedModel(std::move(config), options_.topology,
                                                     &options_.threads->cpu, options_.metrics));
  model->history = history;
  return model;
}

absl::StatusOr<std::shared_ptr<step::ServedModel>> ModelRegistry::Fetch(uint64_t model_id,
                                                                        uint64_t history,
                                                                        const ShardModels& shards,
                                                                        rpc::CallContext* context) {
  internal::v1::FindModelRequest request;
  request.set_model_id(model_id);
  absl::Status error = NotDeclared(model_id);
  for (size_t shard = 0; shard < shards_.size(); ++shard) {
    auto found = shards_[shard].FindModel(request, context);
    if (found.ok()) {
      ASSIGN_OR_RETURN(auto model, MakeModel(found->config(), history));
      model->serves = shards.ServesOf(model_id, history);
      model->SetLimits(shards.LimitsOf(model_id, history));
      return model;
    }
    if (!absl::IsNotFound(found.status())) error = found.status();
  }
  return error;
}

absl::StatusOr<step::ServedModelPtr> ModelRegistry::Refresh(uint64_t model_id,
                                                            rpc::CallContext* context) {
  if (model_id == 0) return NotDeclared(model_id);
  const Known known = Recall(model_id);
  ShardModels shards = changes_.Ask(context);
  const ModelVerdict verdict = Judge(model_id, known.history(), &shards, context);
  switch (verdict.state) {
    case ModelState::kUnknown:
      return shards.complete();
    case ModelState::kAbsent:
      Forget(model_id);
      // A shard that could not be asked may have it.
      RETURN_IF_ERROR(shards.complete());
      return NotDeclared(model_id);
    case ModelState::kUnfinished:
      if (const auto begun = Fetch(model_id, 0, shards, context);
          begun.ok() && config::HasAssignedTable((*begun)->config)) {
        return absl::UnavailableError(
            absl::StrCat("model '", (*begun)->config.name(),
                         "' does not have all its first rows yet: the client that declared it is "
                         "assigning them (",
                         shards.Merged(model_id).changes(),
                         " assignments so far); retry; if that client has died, declare the model "
                         "again, which begins anew"));
      }
      return absl::UnavailableError(
          absl::StrCat("model_id ", HexId(model_id),
                       " is being declared, reset, restored or dropped; "
                       "retry; if that does not end, declare, reset, restore or drop it again"));
    case ModelState::kServing: {
      if (known.history() == verdict.history) {
        SetLost(model_id, absl::OkStatus());
        known.model->SetLimits(shards.LimitsOf(model_id, verdict.history));
        return known.model;
      }
      RETURN_IF_ERROR(shards.know_limits());  // those of the declaration may be out of date
      ASSIGN_OR_RETURN(step::ServedModelPtr model,
                       Fetch(model_id, verdict.history, shards, context));
      // Whoever has made other rows since the shards were asked knows better.
      const Known now = Recall(model_id);
      if (now.model != known.model && now.model != nullptr) return now.model;
      Remember(model);
      return model;
    }
    case ModelState::kLost:
      break;
  }
  step::ServedModelPtr model = known.model;
  if (model == nullptr) {
    ASSIGN_OR_RETURN(model, Fetch(model_id, verdict.history, shards, context));
    Remember(model);
  }
  absl::Status lost = LostError(*model, verdict);
  SetLost(model_id, lost);
  return options_.explain_lost(model->config.name(), lost);
}

absl::StatusOr<step::ServedModelPtr> ModelRegistry::Find(uint64_t model_id,
                                                         rpc::CallContext* context) {
  const Known known = Recall(model_id);
  if (known.model != nullptr && known.lost.empty()) return known.model;
  return Refresh(model_id, context);
}

absl::StatusOr<step::ServedModelPtr> ModelRegistry::FindAnew(uint64_t model_id,
                                                             rpc::CallContext* context) {
  rpc::LinkedContext asking(context, kExplainDeadline);
  return Refresh(model_id, asking.get());
}

absl::StatusOr<step::ServedModelPtr> ModelRegistry::FindUnfilled(uint64_t model_id,
                                                                 uint64_t history,
                                                                 rpc::CallContext* context) {
  const ShardModels shards = changes_.Ask(context);
  RETURN_IF_ERROR(shards.CheckUnfilled(model_id, history));
  if (shards.Judge(model_id, 0).state == ModelState::kServing) {
    return absl::FailedPreconditionError(
        "history: the model has all its first rows, and is served; assign rows without a history");
  }
  return Fetch(model_id, history, shards, context);
}

absl::StatusOr<step::ServedModelPtr> ModelRegistry::FindByName(const std::string& name,
                                                               rpc::CallContext* context) {
  if (name.empty()) {
    return absl::InvalidArgumentError("the model's name is empty; give that of a declared model");
  }
  if (const uint64_t id = IdOf(name); id != 0) return Find(id, context);
  const ShardModels shards = changes_.Ask(context);
  if (const uint64_t id = shards.FindName(name); id != 0) return Find(id, context);
  RETURN_IF_ERROR(shards.complete());
  std::vector<std::string> names;
  for (const Known& known : models()) names.push_back(known.model->config.name());
  return absl::NotFoundError(absl::StrCat("model '", name, "' is not declared; ",
                                          KnownNames("models", name, names),
                                          ". `emberctl declare FILE` declares one"));
}

absl::StatusOr<step::ServedModelPtr> ModelRegistry::FindByNameAnew(const std::string& name,
                                                                   rpc::CallContext* context) {
  auto found = FindByName(name, context);
  if (found.ok()) found = FindAnew((*found)->id, context);
  return absl::IsNotFound(found.status()) ? FindByName(name, context) : found;
}

absl::Status ModelRegistry::CheckNotLost(uint64_t model_id, rpc::CallContext* context) {
  if (Recall(model_id).lost.empty()) return absl::OkStatus();
  return Refresh(model_id, context).status();
}

absl::Status ModelRegistry::Explain(uint64_t model_id, uint64_t history,
                                    const absl::Status& status) {
  if (!absl::IsDataLoss(status)) return status;
  rpc::CallContext context(SteadyNow() + kExplainDeadline);
  const auto now = Refresh(model_id, &context);
  if (!now.ok()) return now.status();
  // All shards have the rows by now.
  if ((*now)->history == history) return absl::UnavailableError(status.message());
  return absl::AbortedError(absl::StrCat(
      "model '", (*now)->config.name(),
      "' was reset, or dropped and declared again, since this began; begin again with its rows of "
      "now (history ",
      HexId((*now)->history), ")"));
}

void ModelRegistry::Watch() {
  changes_.Retry();
  const std::vector<Known> known = models();
  rpc::CallContext context(SteadyNow() + kWatchDeadline);
  const ShardModels shards = changes_.Ask(&context);
  for (const Known& entry : known) {
    const uint64_t id = entry.model->id;
    const ModelVerdict verdict = shards.Judge(id, entry.model->history);
    const bool lost = verdict.state == ModelState::kLost;
    bool doubted = lost;
    {
      absl::MutexLock lock(&mutex_);
      const auto found = models_.find(id);
      if (found == models_.end()) continue;
      std::swap(found->second.doubted, doubted);
      found->second.rows = shards.Merged(id);
    }
    if (lost && (doubted || !verdict.lost_change.empty())) {
      SetLost(id, LostError(*entry.model, verdict));
    }
    const bool changed =
        verdict.state == ModelState::kServing && verdict.history != entry.model->history;
    if (!changed) entry.model->SetLimits(shards.LimitsOf(id, entry.model->history));
    if (changed || verdict.state == ModelState::kAbsent || (!lost && !entry.lost.empty())) {
      Refresh(id, &context).status().IgnoreError();
    } else if (verdict.state == ModelState::kServing && entry.model->read_only()) {
      DropFollowed(*entry.model, shards, &context);
    }
  }
  LearnModels(shards);
}

void ModelRegistry::LearnModels(const ShardModels& shards) {
  for (const uint64_t id : shards.Ids()) {
    if (Recall(id).model != nullptr) continue;
    const ModelState state = shards.Judge(id, 0).state;
    if (state != ModelState::kServing && state != ModelState::kLost) continue;
    rpc::CallContext context(SteadyNow() + kWatchDeadline);
    Refresh(id, &context).status().IgnoreError();  // the next Watch tries again
  }
}

// ---- Changes

absl::Status ModelRegistry::CheckName(const ShardModels& shards, rpc::CallContext* context,
                                      v1::ModelConfig* config) {
  const uint64_t asked_for = config::ModelFingerprint(*config);
  uint64_t model_id = asked_for;
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto other = shards.OnShard(static_cast<int>(i), config->name());
    if (!other.serving() || other.model_id() == model_id) continue;
    internal::v1::FindModelRequest request;
    request.set_model_id(other.model_id());
    auto found = shards_[i].FindModel(request, context);
    if (absl::IsNotFound(found.status())) continue;  // it has just been dropped
    RETURN_IF_ERROR(found.status());
    // Shards may have two of them, declared at once.
    if (model_id != asked_for || !config::DifferInSamplesAlone(found->config(), *config)) {
      return absl::AlreadyExistsError(
          absl::StrCat("another model '", config->name(), "' is declared, with model_id ",
                       HexId(other.model_id()),
                       "; first difference: ", config::FirstDifference(found->config(), *config)));
    }
    *config = found->config();
    model_id = other.model_id();
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelRegistry::Declared> ModelRegistry::TryDeclare(
    v1::ModelConfig config, const FindRows& find_rows, uint64_t filled,
    std::shared_ptr<step::ServedModel>* fresh, rpc::CallContext* context) {
  const uint64_t id = config::ModelFingerprint(config);
  const Known known = Recall(id);
  ShardModels shards = changes_.Ask(context);
  RETURN_IF_ERROR(shards.complete());
  RETURN_IF_ERROR(CheckName(shards, context, &config));
  const auto as_it_is = [&](v1::ModelConfig there) {
    fresh->reset();
    return TryDeclare(std::move(there), find_rows, filled, fresh, context);
  };
  if (config::ModelFingerprint(config) != id) return as_it_is(std::move(config));
  const ModelVerdict verdict = Judge(id, known.history(), &shards, context);
  const bool serving = verdict.state == ModelState::kServing;
  if (serving && known.history() == verdict.history) {
    SetLost(id, absl::OkStatus());
    return Declared{known.model};
  }
  if (*fresh == nullptr) {
    ASSIGN_OR_RETURN(*fresh, MakeModel(config, 0));
  }
  step::ServedModel& model = **fresh;
  model.serves = shards.ServesOf(id, verdict.history);
  if (verdict.state == ModelState::kLost) {
    const absl::Status lost = LostError(known.model == nullptr ? model : *known.model, verdict);
    SetLost(id, lost);
    return options_.explain_lost(config.name(), lost);
  }
  if (!serving && model.read_only()) return BeingRestored(config);
  if (!serving && filled != 0) RETURN_IF_ERROR(shards.CheckUnfilled(id, filled));
  // What another coordinator has begun is finished, so that both may go on.
  const auto begun = shards.OnShard(0, config.name());
  const bool join = begun.model_id() == id;
  if (join && begun.restored() && !begun.serving()) return BeingRestored(config);
  // Part of what a client has assigned is of no use to others. Where shard 0 serves it, it is all.
  const bool whole = filled != 0 || (join && begun.serving());
  bool fill = !serving && !whole && config::HasAssignedTable(config);
  const bool goes_on = join && !fill;
  model.history = serving ? verdict.history : goes_on ? begun.history() : rpc::RandomId();
  if (!serving) {
    std::optional<RowSource> source;
    RETURN_IF_ERROR(CheckShared(&config, /*changes_rows=*/false, shards, context));
    if (config::ModelFingerprint(config) != id) return as_it_is(std::move(config));
    if (!goes_on && find_rows != nullptr) {
      ASSIGN_OR_RETURN(source, find_rows(config));
    }
    if (source.has_value()) {
      const v1::ModelConfig& saved = source->chain.front().manifest().config();
      if (config::DifferInSamplesAlone(saved, config)) config = saved;  // it keeps its plan
      config::AdoptSeedNames(saved, &config);
      if (config::ModelFingerprint(config) != id) return as_it_is(std::move(config));
      RETURN_IF_ERROR(CheckShared(&config, /*changes_rows=*/true, shards, context));
    }
    fill &= !source.has_value();
    const absl::Status made = changes_.Make(model, model.history, shards,
                                            source.has_value() ? &*source : nullptr, context, fill);
    if (!made.ok()) {
      if (filled == 0) changes_.Undo(id, model.history);
      // Another coordinator may have made its model just now; the next attempt says what differs.
      return absl::IsAlreadyExists(made) && config::HasSharedTables(config)
                 ? absl::AbortedError(made.message())
                 : made;
    }
  }
  if (fill) return Declared{*fresh, /*created=*/true, /*unfilled=*/true};
  if (serving) model.SetLimits(shards.LimitsOf(id, model.history));
  Remember(*fresh);
  return Declared{*fresh, /*created=*/!serving};
}

absl::StatusOr<ModelRegistry::Declared> ModelRegistry::Declare(v1::ModelConfig config,
                                                               const FindRows& find_rows,
                                                               rpc::CallContext* context,
                                                               uint64_t filled) {
  RETURN_IF_ERROR(config::CompleteModel(&config));
  ASSIGN_OR_RETURN(const auto turn, Take(&changing_, context));
  // It may be lost on all shards, of which none tells its plan then.
  const Known named = Recall(IdOf(config.name()));
  if (named.model != nullptr && config::DifferInSamplesAlone(named.model->config, config)) {
    config = named.model->config;
  }
  std::shared_ptr<step::ServedModel> fresh;
  if (Recall(config::ModelFingerprint(config)).model == nullptr) {
    ASSIGN_OR_RETURN(fresh, MakeModel(config, 0));
  }
  absl::StatusOr<Declared> declared = TryDeclare(config, find_rows, filled, &fresh, context);
  for (int i = 1; i < kAttempts && absl::IsAborted(declared.status()); ++i) {
    absl::SleepFor(kPause * i);
    declared = TryDeclare(config, find_rows, filled, &fresh, context);
  }
  if (declared.ok() && declared->created && !declared->unfilled) {
    const step::ServedModel& model = *declared->model;
    ops::Log(ops::LogLevel::kInfo, "model created",
             {{"model", model.config.name()},
              {"model_id", HexId(model.id)},
              {"tables", model.config.tables_size()},
              {"stacks", model.plan.stacks.size()}});
  }
  return declared;
}

absl::StatusOr<bool> ModelRegistry::Drop(const std::string& name, const SettleChanges& settle,
                                         rpc::CallContext* context) {
  ASSIGN_OR_RETURN(const auto turn, Take(&changing_, context));
  ShardModels shards = changes_.Ask(context);
  RETURN_IF_ERROR(shards.complete());
  // As in Reset: another coordinator may have put another model of this name in its place.
  const uint64_t id = shards.FindName(name) != 0 ? shards.FindName(name) : IdOf(name);
  const Known known = Recall(id);
  RETURN_IF_ERROR(SettleShared(id, settle, &shards, context));
  // What is only read stays in the checkpoint of the model that it comes from.
  const bool read_only =
      known.model != nullptr ? known.model->read_only() : !shards.ServesOf(id, 0).model().empty();
  std::optional<uint64_t> dropped;
  const auto drop = [&]() -> absl::StatusOr<uint64_t> {
    ASSIGN_OR_RETURN(dropped, changes_.Drop(name, id, known.history(), context));
    Forget(IdOf(name));
    return dropped.value_or(0);
  };
  RETURN_IF_ERROR(TakeRows(name, read_only ? nullptr : options_.give_up, drop));
  if (!dropped.has_value()) return false;
  ops::Log(ops::LogLevel::kInfo, "model dropped", {{"model", name}, {"model_id", HexId(id)}});
  return true;
}

absl::StatusOr<step::ServedModelPtr> ModelRegistry::Reset(const std::string& name,
                                                          rpc::CallContext* context) {
  ASSIGN_OR_RETURN(const auto turn, Take(&changing_, context));
  const ShardModels shards = changes_.Ask(context);
  RETURN_IF_ERROR(shards.complete());
  // What the shards have counts: another coordinator may have declared another model of this name.
  const uint64_t id = shards.FindName(name) != 0 ? shards.FindName(name) : IdOf(name);
  if (id == 0) return absl::NotFoundError(absl::StrCat("model '", name, "' is not declared"));
  const Known known = Recall(id);
  ASSIGN_OR_RETURN(const auto model, known.model != nullptr
                                         ? MakeModel(known.model->config, rpc::RandomId())
                                         : Fetch(id, rpc::RandomId(), shards, context));
  model->serves = known.model != nullptr ? known.model->serves : shards.ServesOf(id, 0);
  KeepLimits(shards, *model);
  RETURN_IF_ERROR(step::CheckNotReadOnly(*model, "it has no initial rows"));
  if (config::HasAssignedTable(model->config)) {
    return absl::FailedPreconditionError(
        absl::StrCat("model '", name,
                     "' got its first rows from a client, so that it cannot be reset: drop it "
                     "and declare it again, or restore a checkpoint"));
  }
  RETURN_IF_ERROR(CheckShared(&model->config, /*changes_rows=*/true, shards, context));
  const auto make = [&]() -> absl::StatusOr<uint64_t> {
    RETURN_IF_ERROR(changes_.Make(*model, model->history, shards, nullptr, context));
    Remember(model);
    return shards.OnShard(0, name).history();
  };
  RETURN_IF_ERROR(TakeRows(name, options_.give_up, make));
  ops::Log(ops::LogLevel::kWarning, "model reset: all rows are back at their initial values",
           {{"model", name}, {"model_id", HexId(id)}});
  return model;
}

absl::StatusOr<step::ServedModelPtr> ModelRegistry::Restore(v1::ModelConfig config,
                                                            const RowSource& source,
                                                            rpc::CallContext* context) {
  RETURN_IF_ERROR(config::CompleteModel(&config));
  ASSIGN_OR_RETURN(std::shared_ptr<step::ServedModel> model, MakeModel(config, rpc::RandomId()));
  ASSIGN_OR_RETURN(const auto turn, Take(&changing_, context));
  const ShardModels shards = changes_.Ask(context);
  RETURN_IF_ERROR(shards.complete());
  RETURN_IF_ERROR(CheckName(shards, context, &config));
  if (config::ModelFingerprint(config) != model->id) {
    ASSIGN_OR_RETURN(model, MakeModel(config, rpc::RandomId()));
  }
  if (source.only_lost && shards.Judge(model->id, 0).state == ModelState::kServing) {
    return absl::AbortedError("another coordinator has brought the rows back");
  }
  model->serves = shards.ServesOf(model->id, 0);
  KeepLimits(shards, *model);
  RETURN_IF_ERROR(step::CheckNotReadOnly(*model, "nothing is restored into it"));
  RETURN_IF_ERROR(CheckShared(&config, /*changes_rows=*/true, shards, context));
  const auto begun = shards.OnShard(0, config.name());
  if (begun.restored() && !begun.serving()) return BeingRestored(config);
  const absl::Status made = changes_.Make(*model, model->history, shards, &source, context);
  if (!made.ok()) {
    changes_.Undo(model->id, model->history);
    return made;
  }
  Remember(model);
  ops::Log(ops::LogLevel::kInfo, "model restored from a checkpoint",
           {{"model", config.name()},
            {"model_id", HexId(model->id)},
            {"checkpoint", source.chain.front().manifest().name()}});
  return model;
}

// Models that serve checkpoints: one follows the other under one name while lookups go on.

absl::Status ModelRegistry::CheckServable(const step::ServedModel& model, const ShardModels& shards,
                                          rpc::CallContext* context) {
  const std::string& name = model.config.name();
  for (int shard = 0; shard < static_cast<int>(shards.size()); ++shard) {
    for (const internal::v1::HostedModel& here : shards.AllOnShard(shard, name)) {
      if (here.serves().model().empty()) {
        return absl::AlreadyExistsError(
            absl::StrCat("model '", name,
                         "' is declared on this cluster and serves no checkpoint; serve the "
                         "checkpoint under another name (serve_as, `emberctl serve --as`)"));
      }
    }
  }
  v1::ModelConfig config = model.config;
  RETURN_IF_ERROR(CheckName(shards, context, &config));
  for (const internal::v1::HostedModel& here : shards.HistoriesOf(model.id)) {
    // It goes by itself if nobody goes on with it. Another coordinator may have served it on some
    // shards and be about to do so on the others.
    if (!here.serving()) return BeingRestored(model.config);
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ModelRegistry::MakeRoomBeside(step::ServedModel* model,
                                                       rpc::CallContext* context) {
  ShardModels shards = changes_.Ask(context);
  RETURN_IF_ERROR(shards.complete());
  RETURN_IF_ERROR(CheckServable(*model, shards, context));
  const ModelVerdict verdict = Judge(model->id, /*known=*/0, &shards, context);
  const bool whole = verdict.state == ModelState::kServing;
  const std::vector<internal::v1::HostedModel> here = shards.HistoriesOf(model->id);
  if (here.empty()) return 0;
  // Of rows that some shards have lost, what is left shows that there is a model.
  const uint64_t stays = whole ? verdict.history : here.back().history();
  for (const internal::v1::HostedModel& rows : here) {
    model->serves.set_version(std::max(model->serves.version(), rows.serves().version() + 1));
    if (rows.history() == stays) continue;
    RETURN_IF_ERROR(changes_.DropHistory(model->id, rows.history(), whole, context));
  }
  return whole ? 0 : stays;
}

absl::Status ModelRegistry::MakeServed(const step::ServedModel& model, const RowSource& source,
                                       rpc::CallContext* context) {
  const ShardModels shards = changes_.Ask(context);
  RETURN_IF_ERROR(shards.complete());
  KeepLimits(shards, model);
  absl::Status made = changes_.Make(model, model.history, shards, &source, context);
  if (made.ok()) return made;
  changes_.Undo(model.id, model.history);
  // Where some shards serve it already, all go on with the rows of before.
  rpc::CallContext undoing(SteadyNow() + kUnserveDeadline);
  changes_.DropHistory(model.id, model.history, /*unless_only=*/true, &undoing).IgnoreError();
  return made;
}

absl::StatusOr<step::ServedModelPtr> ModelRegistry::Serve(v1::ModelConfig config,
                                                          const RowSource& source,
                                                          rpc::CallContext* context) {
  RETURN_IF_ERROR(config::CompleteModel(&config));
  CheckName(changes_.Ask(context), context, &config).IgnoreError();  // MakeRoomBeside says more
  ASSIGN_OR_RETURN(std::shared_ptr<step::ServedModel> model, MakeModel(config, rpc::RandomId()));
  const v1::CheckpointManifest& manifest = source.chain.front().manifest();
  model->serves.set_model(manifest.model());
  model->serves.set_checkpoint(manifest.name());
  model->serves.set_checkpoint_id(manifest.checkpoint_id());
  model->serves.set_version(1);
  ASSIGN_OR_RETURN(const auto turn, Take(&serving_, context));
  ASSIGN_OR_RETURN(const uint64_t useless, MakeRoomBeside(model.get(), context));
  absl::Status made = MakeServed(*model, source, context);
  if (absl::IsResourceExhausted(made) && useless != 0) {
    RETURN_IF_ERROR(changes_.DropHistory(model->id, useless, /*unless_only=*/false, context));
    model->history = rpc::RandomId();
    made = MakeServed(*model, source, context);
  }
  RETURN_IF_ERROR(made);
  Remember(model);
  ops::Log(ops::LogLevel::kInfo, "model serves a checkpoint",
           {{"model", config.name()},
            {"model_id", HexId(model->id)},
            {"checkpoint", step::ServesText(model->serves)}});
  return model;
}

void ModelRegistry::DropFollowed(const step::ServedModel& model, const ShardModels& shards,
                                 rpc::CallContext* context) {
  std::vector<uint64_t> followed;
  for (const internal::v1::HostedModel& here : shards.HistoriesOf(model.id)) {
    if (here.serves().version() < model.serves.version()) followed.push_back(here.history());
  }
  {
    absl::MutexLock lock(&mutex_);
    const auto found = models_.find(model.id);
    if (found == models_.end() || found->second.model->history != model.history) return;
    absl::Time& since = found->second.followed;
    since = followed.empty() ? absl::InfiniteFuture() : std::min(since, SteadyNow());
    if (SteadyNow() < since + kFollowedPatience) return;
  }
  for (const uint64_t history : followed) {
    changes_.DropHistory(model.id, history, /*unless_only=*/true, context).IgnoreError();
  }
}

// Models that share tables with others.

absl::Status ModelRegistry::CheckShared(v1::ModelConfig* requested, bool changes_rows,
                                        const ShardModels& shards, rpc::CallContext* context) {
  const v1::ModelConfig& config = *requested;
  if (!config::HasSharedTables(config)) return absl::OkStatus();
  for (const ShardModels::Hosted& other : shards.EveryTrained()) {
    if (other.model.name() == config.name()) continue;
    v1::ModelConfig held;
    if (const Known known = Recall(other.model.model_id()); known.model != nullptr) {
      held = known.model->config;
    } else {
      internal::v1::FindModelRequest request;
      request.set_model_id(other.model.model_id());
      auto found = shards_[other.shard].FindModel(request, context);
      if (absl::IsNotFound(found.status())) continue;  // it has just been dropped
      RETURN_IF_ERROR(found.status());
      held = found->config();
    }
    if (changes_rows) RETURN_IF_ERROR(config::CheckAlone(held, config));
    config::AdoptSeedNames(held, requested);
    RETURN_IF_ERROR(config::CheckSameShared(held, config));
    const std::string resource = config::CommonResource(held, config);
    if (resource.empty()) continue;
    // Shards that lost the rows would begin with new ones, beside trained ones on the others.
    if (shards.Judge(other.model.model_id(), 0).state == ModelState::kLost) {
      return absl::FailedPreconditionError(absl::StrCat(
          "resource '", resource, "' is held by model '", held.name(),
          "', which some shards have lost; drop that model first, and all others that hold it"));
    }
    if (!options_.recovers) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "resource '", resource, "' is held by model '", held.name(),
        "'; with storage.durability CHECKPOINT, models cannot share tables: each goes back to a "
        "checkpoint of its own if rows are lost, and these do not agree. Use MEMORY or LOG"));
  }
  return absl::OkStatus();
}

absl::Status ModelRegistry::SettleShared(uint64_t model_id, const SettleChanges& settle,
                                         ShardModels* shards, rpc::CallContext* context) {
  const Known known = Recall(model_id);
  if (known.model != nullptr && !config::HasSharedTables(known.model->config)) {
    return absl::OkStatus();
  }
  const ModelVerdict verdict = Judge(model_id, known.history(), shards, context);
  RETURN_IF_ERROR(shards->complete());
  if (verdict.state != ModelState::kServing) return absl::OkStatus();
  step::ServedModelPtr model = known.model;
  if (known.history() != verdict.history) {
    ASSIGN_OR_RETURN(model, Fetch(model_id, verdict.history, *shards, context));
    if (!config::HasSharedTables(model->config)) return absl::OkStatus();
  }
  const absl::Status settled = settle(model);
  if (!absl::IsDataLoss(settled)) return settled;
  return absl::UnavailableError(absl::StrCat("a shard lost model '", model->config.name(),
                                             "' just before it was dropped; try again"));
}

// Limits that change while a model is served: shard 0 knows those that count, and every coordinator
// asks it each second.
absl::StatusOr<v1::SetLimitsResponse> ModelRegistry::SetLimits(const v1::SetLimitsRequest& request,
                                                               rpc::CallContext* context) {
  ASSIGN_OR_RETURN(const auto turn, Take(&changing_, context));
  for (int attempt = 1;; ++attempt) {
    ASSIGN_OR_RETURN(const auto model, FindByNameAnew(request.model(), context));
    auto serve = step::OfRows<internal::v1::ServeModelRequest>(model->id, model->history);
    internal::v1::ModelLimits& limits = *serve.mutable_limits();
    limits.set_version(model->LimitsNow().version() + 1);
    ASSIGN_OR_RETURN(const auto stacks, ChangedLimits(*model, model->PlanNow(), request));
    limits.mutable_stacks()->Add(stacks.begin(), stacks.end());
    const absl::Status set = shards_[0].ServeModel(serve, context).status();
    if (absl::IsAborted(set) && attempt < kAttempts) continue;
    RETURN_IF_ERROR(set);
    model->SetLimits(limits);
    ops::Log(ops::LogLevel::kInfo, "limits of a model changed",
             {{"model", request.model()}, {"limits", LimitsText(limits)}});
    v1::SetLimitsResponse response;
    response.mutable_limits()->Add(stacks.begin(), stacks.end());
    return response;
  }
}

}  // namespace emberd::coordinator
