#include "server/shard/hosted_models.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace emberd::server {

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
      stack.tables.push_back({.name = table_plan.name,
                              .vocabulary_size = table_plan.vocabulary_size,
                              .padded_vocabulary_size = table_plan.padded_vocabulary_size,
                              .embedding_dim = table_plan.embedding_dim,
                              .row_offset = table_plan.row_offset,
                              .shard_rotation = table_plan.shard_rotation,
                              .initializer = config.tables(table_plan.table).initializer()});
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
      place_.sparsecores_per_shard, " SparseCores each; the coordinator takes it for shard ",
      request.shard_index(), " of ", request.shards(), " with ", request.sparsecores_per_shard()));
}

absl::Status HostedModels::CheckName(const v1::ModelConfig& config) const {
  for (const auto& [id, model] : models_) {
    if (model.config.name() == config.name()) {
      return absl::AlreadyExistsError(absl::StrCat("another model '", config.name(),
                                                   "' is declared here, with model_id ",
                                                   absl::Hex(id, absl::kZeroPad16)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> HostedModels::Create(const internal::v1::CreateModelRequest& request) {
  RETURN_IF_ERROR(CheckPlace(request));
  const v1::ModelConfig& config = request.config();
  absl::MutexLock lock(&mutex_);
  if (models_.contains(request.model_id())) return false;
  RETURN_IF_ERROR(CheckName(config));
  ASSIGN_OR_RETURN(
      const preprocess::Plan plan,
      preprocess::MakePlan(config, {.shards = place_.shards,
                                    .sparsecores_per_shard = place_.sparsecores_per_shard}));
  if (plan.fingerprint != request.plan_fingerprint()) {
    return absl::FailedPreconditionError(
        absl::StrCat("model '", config.name(), "' is planned differently here (fingerprint ",
                     plan.fingerprint, ") and by the coordinator (", request.plan_fingerprint(),
                     "): do both run the same version of emberd?"));
  }
  RETURN_IF_ERROR(
      engine_->CreateModel(ModelSpecFromPlan(request.model_id(), config, plan, place_.index)));
  std::vector<std::string> stacks;
  for (const preprocess::StackPlan& stack : plan.stacks) stacks.push_back(stack.name);
  models_[request.model_id()] = {config, metrics_->ShardModel(place_.index, config.name(), stacks)};
  return true;
}

absl::StatusOr<internal::v1::FindModelResponse> HostedModels::Find(
    const internal::v1::FindModelRequest& request) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [id, model] : models_) {
    const bool found =
        request.model_id() != 0 ? id == request.model_id() : model.config.name() == request.name();
    if (!found) continue;
    internal::v1::FindModelResponse response;
    response.set_model_id(id);
    *response.mutable_config() = model.config;
    return response;
  }
  return absl::NotFoundError("no such model is declared here");
}

absl::Status HostedModels::Drop(uint64_t model_id, absl::FunctionRef<void()> forget_rest) {
  absl::MutexLock lock(&mutex_);
  if (models_.erase(model_id) == 0) {
    return absl::NotFoundError(
        absl::StrCat("model_id ", absl::Hex(model_id, absl::kZeroPad16), " is not declared here"));
  }
  forget_rest();
  return engine_->DropModel(model_id);
}

ops::ShardModelMetrics* HostedModels::MetricsOf(uint64_t model_id) const {
  absl::MutexLock lock(&mutex_);
  const auto found = models_.find(model_id);
  return found == models_.end() ? nullptr : found->second.metrics;
}

}  // namespace emberd::server
