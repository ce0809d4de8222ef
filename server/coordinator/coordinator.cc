#include "server/coordinator/coordinator.h"

#include <thread>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "preprocess/plan/plan.h"
#include "server/coordinator/for_each_shard.h"
#include "server/ops/logging.h"

namespace emberd::server {
namespace {

constexpr absl::Duration kSweepPeriod = absl::Seconds(1);
constexpr absl::Duration kStatusDeadline = absl::Seconds(1);

int ThreadCount(const v1::ClusterConfig& cluster) {
  return cluster.coordinator_threads() > 0 ? cluster.coordinator_threads()
                                           : static_cast<int>(std::thread::hardware_concurrency());
}

ModelRegistryOptions RegistryOptions(const v1::ClusterConfig& cluster, ops::Metrics* metrics) {
  ModelRegistryOptions options;
  options.topology = {cluster.shards_size(), cluster.sparsecores_per_shard()};
  options.preprocess_threads = ThreadCount(cluster);
  options.metrics = metrics;
  return options;
}

std::string NewIdentity(int index) {
  absl::BitGen random;
  return absl::StrCat("coordinator ", index, ", life ",
                      absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16));
}

std::vector<std::string> HttpAddresses(const v1::ClusterConfig& cluster) {
  std::vector<std::string> addresses;
  for (const v1::ShardConfig& shard : cluster.shards()) addresses.push_back(shard.http_address());
  return addresses;
}

std::vector<Collective*> CollectivesOf(const std::vector<std::shared_ptr<ShardBackend>>& shards) {
  std::vector<Collective*> collectives;
  for (const auto& shard : shards) collectives.push_back(shard->collective());
  return collectives;
}

}  // namespace

Coordinator::Coordinator(const v1::ClusterConfig& cluster, int index,
                         std::vector<std::shared_ptr<ShardBackend>> shards, ops::Metrics* metrics)
    : shards_(std::move(shards)),
      collective_(CollectivesOf(shards_)),
      shard_http_addresses_(HttpAddresses(cluster)),
      sparsecores_per_shard_(cluster.sparsecores_per_shard()),
      max_message_bytes_(cluster.budgets().max_message_bytes()),
      batch_ttl_(absl::Milliseconds(cluster.timeouts().batch_ttl_ms())),
      shard_call_(absl::Milliseconds(cluster.timeouts().shard_call_ms())),
      start_(absl::Now()),
      metrics_(metrics),
      server_metrics_(metrics->Server("coordinator", index)),
      registry_(shards_, RegistryOptions(cluster, metrics)),
      fanout_(shards_,
              {.batch_ttl = batch_ttl_, .shard_call = shard_call_, .threads = ThreadCount(cluster)},
              &registry_, metrics),
      batches_({cluster.budgets().batch_bytes(), cluster.budgets().max_batches()}),
      resources_{.coordinator = NewIdentity(index),
                 .registry = &registry_,
                 .fanout = &fanout_,
                 .batches = &batches_,
                 .collective = &collective_,
                 .metrics = metrics,
                 .max_message_bytes = max_message_bytes_,
                 .batch_ttl = batch_ttl_,
                 .shard_call = shard_call_,
                 .slow_step = absl::Milliseconds(cluster.logging().slow_step_ms())},
      sweeper_(kSweepPeriod, [this] { Sweep(); }) {
  server_metrics_->SetBatchBudget(cluster.budgets().max_batches(), cluster.budgets().batch_bytes());
  server_metrics_->SetInFlightBudget(cluster.budgets().in_flight_bytes());
}

void Coordinator::Sweep() {
  server_metrics_->AddExpiredBatches(static_cast<int64_t>(batches_.Sweep(absl::Now()).size()));
  server_metrics_->SetBatches(batches_.count(), batches_.bytes());
  const auto models = registry_.models();
  int64_t table_bytes = 0;
  for (const auto& model : models)
    table_bytes += preprocess::PlanToProto(model->config, model->plan).table_bytes();
  server_metrics_->SetModels(static_cast<int64_t>(models.size()));
  server_metrics_->SetTableBytes(table_bytes);
}

absl::StatusOr<v1::DeclareModelResponse> Coordinator::DeclareModel(
    const v1::DeclareModelRequest& request, rpc::CallContext* context) {
  auto declared = registry_.Declare(request.config(), context);
  if (!declared.ok()) return declared.status();
  v1::DeclareModelResponse response;
  response.set_model_id(declared->model->id);
  response.set_created(declared->created);
  *response.mutable_plan() =
      preprocess::PlanToProto(declared->model->config, declared->model->plan);
  return response;
}

absl::StatusOr<v1::DescribeModelResponse> Coordinator::DescribeModel(
    const v1::DescribeModelRequest& request, rpc::CallContext* context) {
  auto model = request.model_id() != 0 ? registry_.Find(request.model_id(), context)
                                       : registry_.FindByName(request.name(), context);
  if (!model.ok()) return model.status();
  v1::DescribeModelResponse response;
  response.set_model_id((*model)->id);
  *response.mutable_config() = (*model)->config;
  *response.mutable_plan() = preprocess::PlanToProto((*model)->config, (*model)->plan);
  return response;
}

absl::StatusOr<v1::ReleaseBatchResponse> Coordinator::ReleaseBatch(
    const v1::ReleaseBatchRequest& request, rpc::CallContext*) {
  auto batch = batches_.Claim(request.batch_handle());
  if (!batch.ok()) return batch.status();
  if ((*batch)->model->id != request.model_id()) {
    batches_.Unclaim(request.batch_handle());
    return absl::InvalidArgumentError(absl::StrCat("batch_handle ", request.batch_handle(),
                                                   " belongs to model_id ", (*batch)->model->id,
                                                   ", not ", request.model_id()));
  }
  batches_.Erase(request.batch_handle());
  fanout_.Release(request.model_id(), request.batch_handle());
  return v1::ReleaseBatchResponse();
}

absl::StatusOr<v1::GetLimitsResponse> Coordinator::GetLimits(const v1::GetLimitsRequest& request,
                                                             rpc::CallContext* context) {
  auto model = registry_.FindByName(request.model(), context);
  if (!model.ok()) return model.status();
  return (*model)->observed->Limits((*model)->plan);
}

v1::GetStatusResponse Coordinator::GetStatus(rpc::CallContext* context) {
  v1::GetStatusResponse response;
  response.set_version(EMBERD_VERSION);
  response.set_uptime_ms(absl::ToInt64Milliseconds(uptime()));
  response.set_batches(static_cast<int>(batches_.count()));
  response.set_batch_bytes(batches_.bytes());
  for (const auto& model : registry_.models()) {
    v1::ModelStatus* status = response.add_models();
    status->set_model_id(model->id);
    status->set_name(model->config.name());
    status->set_tables(model->config.tables_size());
    status->set_stacks(static_cast<int>(model->plan.stacks.size()));
    status->set_table_bytes(preprocess::PlanToProto(model->config, model->plan).table_bytes());
  }
  AddShards(/*hot_rows=*/0, context, response.mutable_shards());
  return response;
}

void Coordinator::AddShards(int hot_rows, rpc::CallContext* caller,
                            google::protobuf::RepeatedPtrField<v1::ShardStatus>* shards) {
  rpc::CallContext context(absl::Now() + kStatusDeadline, caller->trace());
  std::vector<int> all;
  for (size_t i = 0; i < shards_.size(); ++i) {
    all.push_back(static_cast<int>(i));
    shards->Add();
  }
  ForEachShard(all, [&](int shard) {
    auto status = shards_[shard]->GetStatus(hot_rows, &context);
    v1::ShardStatus& to = *shards->Mutable(shard);
    if (status.ok()) to = *std::move(status);
    to.set_index(shard);
    to.set_address(shards_[shard]->address());
    to.set_http_address(shard_http_addresses_[shard]);
    to.set_reachable(status.ok());
    if (!status.ok()) to.set_error(std::string(status.status().message()));
    metrics_->ShardLink(shard)->SetReachable(status.ok());
    return status.status();
  });
}

void Coordinator::AddStacks(v1::GetStatsResponse* stats) const {
  for (const auto& model : registry_.models()) {
    for (v1::StackStats& stack : model->observed->Stats(model->plan)) {
      stack.set_model(model->config.name());
      *stats->add_stacks() = std::move(stack);
    }
  }
}

}  // namespace emberd::server
