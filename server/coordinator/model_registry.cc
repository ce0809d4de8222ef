#include "server/coordinator/model_registry.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/suggest.h"
#include "config/config.h"
#include "server/coordinator/fanout.h"
#include "server/ops/logging.h"

namespace emberd::server {

ModelRegistry::ModelRegistry(std::vector<std::shared_ptr<ShardBackend>> shards,
                             ModelRegistryOptions options)
    : shards_(std::move(shards)), options_(options) {}

internal::v1::CreateModelRequest ModelRegistry::CreateRequest(const ServedModel& model,
                                                              int shard) const {
  internal::v1::CreateModelRequest request;
  request.set_model_id(model.id);
  *request.mutable_config() = model.config;
  request.set_shards(options_.topology.shards);
  request.set_sparsecores_per_shard(options_.topology.sparsecores_per_shard);
  request.set_shard_index(shard);
  request.set_plan_fingerprint(model.plan.fingerprint);
  return request;
}

absl::StatusOr<ModelRegistry::Declared> ModelRegistry::Declare(v1::ModelConfig config,
                                                               rpc::CallContext* context) {
  RETURN_IF_ERROR(config::CompleteModel(&config));
  absl::MutexLock lock(&declaring_);
  std::shared_ptr<const ServedModel> model = Known(config::ModelFingerprint(config));
  if (model == nullptr) {
    ASSIGN_OR_RETURN(auto made, MakeServedModel(std::move(config), options_.topology,
                                                &options_.threads->cpu, options_.metrics));
    model = std::move(made);
  }
  absl::StatusOr<Declared> declared = CreateOnShards(model, context);
  if (!declared.ok()) return declared;
  {
    absl::MutexLock models_lock(&mutex_);
    models_.try_emplace(model->id, model);
  }
  if (declared->created) {
    ops::Log(ops::LogLevel::kInfo, "model created",
             {{"model", model->config.name()},
              {"model_id", absl::StrCat(absl::Hex(model->id, absl::kZeroPad16))},
              {"tables", model->config.tables_size()},
              {"stacks", model->plan.stacks.size()}});
  }
  return declared;
}

absl::StatusOr<ModelRegistry::Declared> ModelRegistry::CreateOnShards(
    std::shared_ptr<const ServedModel> model, rpc::CallContext* context) {
  std::vector<char> created(shards_.size());
  const auto create = [&](int shard) {
    auto response = shards_[shard]->CreateModel(CreateRequest(*model, shard), context);
    created[shard] = response.ok() && response->created();
    return response.status();
  };
  // Shard 0 first and alone: of two conflicting declarations through two coordinators, one wins
  // there.
  absl::Status status = create(0);
  if (status.ok()) {
    status = FirstError(
        ForEachShard(&options_.threads->blocking, ShardsFrom(1, shards_.size()), create));
  }
  size_t count = 0;
  for (const char shard_created : created) count += shard_created;
  if (status.ok()) return Declared{std::move(model), count == shards_.size()};

  for (size_t i = 0; i < shards_.size(); ++i) {
    if (created[i]) shards_[i]->DropModel(model->id, context).IgnoreError();
  }
  if (absl::IsAlreadyExists(status)) return DescribeConflict(*model, status, context);
  return status;
}

absl::Status ModelRegistry::DescribeConflict(const ServedModel& model, const absl::Status& conflict,
                                             rpc::CallContext* context) {
  internal::v1::FindModelRequest request;
  request.set_name(model.config.name());
  for (const std::shared_ptr<ShardBackend>& shard : shards_) {
    auto found = shard->FindModel(request, context);
    if (!found.ok()) continue;
    return absl::AlreadyExistsError(absl::StrCat(
        "another model '", model.config.name(), "' is declared, with model_id ",
        absl::Hex(found->model_id(), absl::kZeroPad16),
        "; first difference: ", config::FirstDifference(found->config(), model.config)));
  }
  return conflict;
}

absl::StatusOr<std::shared_ptr<const ServedModel>> ModelRegistry::FindOnShards(
    const internal::v1::FindModelRequest& request, rpc::CallContext* context) {
  absl::Status error;
  for (const std::shared_ptr<ShardBackend>& shard : shards_) {
    auto found = shard->FindModel(request, context);
    if (absl::IsNotFound(found.status())) continue;
    if (!found.ok()) {
      error = found.status();
      continue;
    }
    ASSIGN_OR_RETURN(auto model, MakeServedModel(found->config(), options_.topology,
                                                 &options_.threads->cpu, options_.metrics));
    absl::MutexLock lock(&mutex_);
    return models_.try_emplace(model->id, model).first->second;
  }
  // A shard that could not be asked may have it.
  if (!error.ok()) return error;
  return absl::NotFoundError("");
}

std::shared_ptr<const ServedModel> ModelRegistry::Known(uint64_t model_id) const {
  absl::MutexLock lock(&mutex_);
  const auto found = models_.find(model_id);
  return found == models_.end() ? nullptr : found->second;
}

absl::StatusOr<std::shared_ptr<const ServedModel>> ModelRegistry::Find(uint64_t model_id,
                                                                       rpc::CallContext* context) {
  if (std::shared_ptr<const ServedModel> model = Known(model_id)) return model;
  internal::v1::FindModelRequest request;
  request.set_model_id(model_id);
  const absl::Status unknown = absl::NotFoundError(absl::StrCat(
      "model_id ", absl::Hex(model_id, absl::kZeroPad16), " is not declared; call DeclareModel"));
  if (model_id == 0) return unknown;  // 0 would ask for a name
  auto model = FindOnShards(request, context);
  return absl::IsNotFound(model.status()) ? unknown : model;
}

absl::StatusOr<std::shared_ptr<const ServedModel>> ModelRegistry::FindByName(
    const std::string& name, rpc::CallContext* context) {
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [id, model] : models_) {
      if (model->config.name() == name) return model;
    }
  }
  internal::v1::FindModelRequest request;
  request.set_name(name);
  auto model = FindOnShards(request, context);
  if (!absl::IsNotFound(model.status())) return model;
  std::vector<std::string> names;
  for (const auto& known : models()) names.push_back(known->config.name());
  return absl::NotFoundError(absl::StrCat("model '", name, "' is not declared; ",
                                          KnownNames("models", name, names),
                                          ". `emberctl declare FILE` declares one"));
}

absl::Status ModelRegistry::Restore(const ServedModel& model, int shard,
                                    rpc::CallContext* context) {
  auto response = shards_[shard]->CreateModel(CreateRequest(model, shard), context);
  if (response.ok() && response->created()) {
    ops::Log(ops::LogLevel::kWarning, "shard restarted: its rows are back at their initial values",
             {{"model", model.config.name()}, {"shard", shard}});
  }
  return response.status();
}

std::vector<std::shared_ptr<const ServedModel>> ModelRegistry::models() const {
  absl::MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<const ServedModel>> models;
  for (const auto& [id, model] : models_) models.push_back(model);
  std::sort(models.begin(), models.end(),
            [](const auto& a, const auto& b) { return a->config.name() < b->config.name(); });
  return models;
}

}  // namespace emberd::server
