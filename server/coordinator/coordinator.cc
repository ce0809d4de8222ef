#include "server/coordinator/coordinator.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/optimizers.h"
#include "preprocess/plan/plan.h"
#include "server/coordinator/train/train_session.h"
#include "server/group/group.h"
#include "server/ops/logging.h"
#include "server/rpc/local_peers.h"

namespace emberd::coordinator {
namespace {

constexpr absl::Duration kSweepPeriod = absl::Seconds(1);
constexpr int kSweepsPerSettlement = 5;
constexpr absl::Duration kStatusDeadline = absl::Seconds(1);

std::vector<std::string> HttpAddresses(const v1::ClusterConfig& cluster) {
  std::vector<std::string> addresses;
  for (const v1::ShardConfig& shard : cluster.shards()) addresses.push_back(shard.http_address());
  return addresses;
}

// What can be read and assigned of each table beside its weights.
void AddSlots(const v1::ModelConfig& model, v1::DescribeModelResponse* response) {
  for (const v1::TableConfig& table : model.tables()) {
    for (const config::SlotInfo& info : config::OptimizerSlots(table.optimizer())) {
      v1::SlotShape* const slot = response->add_slots();
      slot->set_table(table.name());
      slot->set_slot(std::string(info.name));
      slot->add_shape(table.vocabulary_size());
      slot->add_shape(info.one_per_row ? 1 : table.embedding_dim());
    }
  }
}

constexpr absl::Duration kUnpinDeadline = absl::Seconds(2);
// How long a drop waits for a checkpoint that fixes its moment.
constexpr absl::Duration kDropPatience = absl::Seconds(10);

// One call of DropGroup: the shards forget a group, after they have finished, or given up, a step
// that was left half done.
class Dropping {
 public:
  Dropping(const step::ServedModel& model, const std::string& group, const step::ShardSet& shards,
           rpc::CallContext* context)
      : model_(model),
        group_(group),
        shards_(shards),
        context_(context),
        host_(group::HostOf({model.id, group}, static_cast<int>(shards.size()))) {}

  absl::StatusOr<v1::DropGroupResponse> Run() {
    RETURN_IF_ERROR(group::CheckGroupName("group", group_));
    // Fails before anything changes, if a rank is at work or a shard is not there.
    RETURN_IF_ERROR(DropOn(host_, {absl::StrCat(group_, "#")}));
    ASSIGN_OR_RETURN(const std::vector<std::string> names, FindNames());
    for (const std::string& name : names) RETURN_IF_ERROR(FinishLastStep(name));
    // The host first, which may refuse.
    RETURN_IF_ERROR(DropOn(host_, names));
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
      if (shard != host_) RETURN_IF_ERROR(DropOn(shard, names));
    }
    v1::DropGroupResponse response;
    response.set_dropped(!names.empty());
    return response;
  }

 private:
  internal::v1::OpenGroupRequest OpenRequest(const std::string& name) const {
    auto request = step::OfRows<internal::v1::OpenGroupRequest>(model_.id, model_.history);
    request.set_group(name);
    return request;
  }

  // The names of the group that any shard knows.
  absl::StatusOr<std::vector<std::string>> FindNames() {
    internal::v1::OpenGroupRequest request = OpenRequest(absl::StrCat(group_, "#0"));
    request.set_ranks(group::kMaxGroupSize);
    ASSIGN_OR_RETURN(const auto answers,
                     shards_.Ask(&host::ShardBackend::OpenGroup, request, context_));
    std::set<std::string> names;
    for (const auto& shard : answers) {
      for (const auto& rank : shard.ranks()) names.insert(absl::StrCat(group_, "#", rank.rank()));
    }
    ASSIGN_OR_RETURN(const auto sync,
                     shards_.Ask(&host::ShardBackend::OpenGroup, OpenRequest(group_), context_));
    for (const auto& shard : sync) {
      if (shard.here()) names.insert(group_);
    }
    return std::vector<std::string>(names.begin(), names.end());
  }

  // Opens a generation of its own. From then on, the shards take neither parts nor decisions of the
  // earlier ranks, which their coordinators may have sent. A step that is still held was made
  // nowhere.
  absl::Status FinishLastStep(const std::string& name) {
    internal::v1::OpenGroupRequest request = OpenRequest(name);
    request.set_size(1);
    ASSIGN_OR_RETURN(const OpenedGroup opened, OpenGroup(shards_, request, context_));
    ASSIGN_OR_RETURN(const auto answers,
                     shards_.Ask(&host::ShardBackend::OpenGroup, OpenRequest(name), context_));
    auto decision = step::OfRows<internal::v1::DecideStepRequest>(model_.id, model_.history);
    decision.set_group(name);
    decision.set_generation(opened.generation);
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
      if (answers[shard].staged_step() >= 0) {
        decision.set_step(answers[shard].staged_step());
        decision.set_commit(false);
        RETURN_IF_ERROR(shards_[shard].DecideStep(decision, context_).status());
      }
      if (!answers[shard].known()) continue;
      // It is decided, but may not have reached the rows.
      decision.set_step(answers[shard].next_step() - 1);
      decision.set_commit(true);
      RETURN_IF_ERROR(shards_[shard].DecideStep(decision, context_).status());
    }
    return absl::OkStatus();
  }

  absl::Status DropOn(size_t shard, const std::vector<std::string>& names) {
    auto request = step::OfRows<internal::v1::DropGroupsRequest>(model_.id, model_.history);
    request.mutable_groups()->Add(names.begin(), names.end());
    return shards_[shard].DropGroups(request, context_).status();
  }

  const step::ServedModel& model_;
  const std::string& group_;
  const step::ShardSet& shards_;
  rpc::CallContext* const context_;
  const size_t host_;
};

}  // namespace

Coordinator::Coordinator(const v1::ClusterConfig& cluster, int index,
                         std::vector<std::shared_ptr<host::ShardBackend>> shards,
                         ops::Metrics* metrics, ThreadPools* threads)
    : shards_(shards, &threads->blocking),
      collective_(std::move(shards), &threads->blocking),
      shard_http_addresses_(HttpAddresses(cluster)),
      start_(SteadyNow()),
      registry_(shards_,
                {.topology = {cluster.shards_size(), cluster.sparsecores_per_shard(),
                              cluster.sparsecores_assumed()},
                 .threads = threads,
                 .metrics = metrics,
                 .explain_lost =
                     [this](const std::string& model, const absl::Status& lost) {
                       return auto_checkpoints_.ExplainLost(model, lost);
                     },
                 .give_up =
                     [this](const std::string& model, uint64_t history) {
                       return auto_checkpoints_.GiveUpRows(model, history);
                     },
                 .recovers = cluster.storage().durability() == v1::StorageConfig::CHECKPOINT}),
      mutations_(shards_, absl::Milliseconds(cluster.timeouts().shard_call_ms())),
      regions_(rpc::MakeRegions(cluster, rpc::LocalPeers::kClients)),
      path_(shards_,
            {.max_activation_bytes = cluster.budgets().max_message_bytes(),
             .batch_ttl = absl::Milliseconds(cluster.timeouts().batch_ttl_ms()),
             .shard_call = absl::Milliseconds(cluster.timeouts().shard_call_ms()),
             .batches = {cluster.budgets().batch_bytes(), cluster.budgets().max_batches()},
             .regions = regions_.get(),
             .copy_gradients = cluster.storage().durability() == v1::StorageConfig::LOG,
             .threads = threads},
            &mutations_, metrics),
      checkpoints_(cluster.storage(), shards_, &mutations_, &registry_, &threads->blocking),
      auto_checkpoints_(&checkpoints_, &registry_, &threads->blocking),
      steps_(&resources_),
      rows_(&resources_, cluster.budgets().max_message_bytes()),
      resources_{.identity = absl::StrCat("coordinator ", index, ", life ",
                                          absl::Hex(rpc::RandomId(), absl::kZeroPad16)),
                 .shards = &shards_,
                 .registry = &registry_,
                 .mutations = &mutations_,
                 .path = &path_,
                 .steps = &steps_,
                 .rows = &rows_,
                 .checkpoints = &checkpoints_,
                 .collective = &collective_,
                 .metrics = metrics,
                 .server_metrics = metrics->Server("coordinator", index),
                 .shard_call = absl::Milliseconds(cluster.timeouts().shard_call_ms()),
                 .slow_step = absl::Milliseconds(cluster.logging().slow_step_ms())},
      sweeper_(kSweepPeriod, [this] { Sweep(); }),
      watch_(kSweepPeriod, [this] {
        registry_.Watch();
        auto_checkpoints_.Watch();
        collective_.Retry();
      }) {
  resources_.server_metrics->SetBudgets(cluster.budgets());
}

void Coordinator::Sweep() {
  resources_.server_metrics->Add(ops::MetricId::kBatchesExpired,
                                 static_cast<double>(path_.batches().Sweep(SteadyNow()).size()));
  resources_.server_metrics->Set(ops::MetricId::kBatches, path_.batches().count());
  resources_.server_metrics->Set(ops::MetricId::kBatchBytes, path_.batches().bytes());
  const auto models = registry_.models();
  int64_t table_bytes = 0;
  for (const ModelRegistry::Known& known : models) {
    table_bytes += preprocess::PlanToProto(known.model->config, known.model->plan).table_bytes();
  }
  resources_.server_metrics->Set(ops::MetricId::kModels, static_cast<double>(models.size()));
  resources_.server_metrics->Set(ops::MetricId::kTableBytes, table_bytes);
  path_.RenewBatches();
  path_.TakeBackRegions();
  if (++sweeps_ % kSweepsPerSettlement == 0) mutations_.SettleLeftovers();
}

absl::StatusOr<v1::DeclareModelResponse> Coordinator::DeclareModel(
    const v1::DeclareModelRequest& request, rpc::CallContext* context) {
  bool back = false;  // its rows have come back
  const auto find_rows = [&](const v1::ModelConfig& config) {
    auto rows = auto_checkpoints_.FindRows(config, request.restore_from());
    back = rows.ok() && rows->has_value() && request.restore_from().empty();
    return rows;
  };
  ASSIGN_OR_RETURN(auto declared,
                   registry_.Declare(request.config(), find_rows, context, request.filled()));
  v1::DeclareModelResponse response;
  response.set_model_id(declared.model->id);
  response.set_created(declared.created && !back);
  response.set_unfilled(declared.unfilled);
  response.set_history(declared.model->history);
  *response.mutable_plan() =
      preprocess::PlanToProto(declared.model->config, declared.model->PlanNow());
  return response;
}

absl::StatusOr<v1::DropModelResponse> Coordinator::DropModel(const v1::DropModelRequest& request,
                                                             rpc::CallContext* context) {
  if (request.name().empty()) {
    return absl::InvalidArgumentError("name is empty; DropModel needs that of a model");
  }
  v1::DropModelResponse response;
  std::unique_ptr<ChangePause> pause;  // until it is gone
  const auto settle = [&](const step::ServedModelPtr& model) {
    const auto begin = [&] {
      pause = checkpoints_.MakePause(model);
      return pause->Settle(context).status();
    };
    // One that shares its tables may be fixing the moment of a checkpoint, which ends soon.
    return InTurn(
        std::min(SteadyNow() + kDropPatience, context->deadline()),
        [&] { return context->cancelled(); }, begin);
  };
  ASSIGN_OR_RETURN(const bool dropped, registry_.Drop(request.name(), settle, context));
  response.set_dropped(dropped);
  return response;
}

absl::StatusOr<v1::ResetModelResponse> Coordinator::ResetModel(const v1::ResetModelRequest& request,
                                                               rpc::CallContext* context) {
  const auto model = registry_.Reset(request.name(), context);
  if (absl::IsNotFound(model.status())) {  // FindByName says which models there are
    RETURN_IF_ERROR(registry_.FindByName(request.name(), context).status());
  }
  RETURN_IF_ERROR(model.status());
  v1::ResetModelResponse response;
  response.set_model_id((*model)->id);
  response.set_history((*model)->history);
  return response;
}

absl::StatusOr<v1::DropGroupResponse> Coordinator::DropGroup(const v1::DropGroupRequest& request,
                                                             rpc::CallContext* context) {
  ASSIGN_OR_RETURN(const auto found, registry_.FindByName(request.model(), context));
  return registry_.OnModel(found->id, context, [&](const step::ServedModelPtr& model) {
    return Dropping(*model, request.group(), shards_, context).Run();
  });
}

absl::StatusOr<v1::DescribeModelResponse> Coordinator::DescribeModel(
    const v1::DescribeModelRequest& request, rpc::CallContext* context) {
  const uint64_t id = request.model_id() != 0 ? request.model_id() : registry_.IdOf(request.name());
  ModelRegistry::Known known = registry_.Recall(id);
  if (known.model == nullptr) {
    ASSIGN_OR_RETURN(known.model, request.model_id() != 0
                                      ? registry_.Find(request.model_id(), context)
                                      : registry_.FindByName(request.name(), context));
  }
  v1::DescribeModelResponse response;
  response.set_model_id(known.model->id);
  response.set_history(known.model->history);
  response.set_lost(known.lost);
  response.set_recovery(auto_checkpoints_.RecoveryOf(known.model->config.name()));
  response.set_serves(step::ServesText(known.model->serves));
  *response.mutable_config() = known.model->config;
  *response.mutable_plan() = preprocess::PlanToProto(known.model->config, known.model->PlanNow());
  AddSlots(known.model->config, &response);
  return response;
}

absl::StatusOr<v1::GetLimitsResponse> Coordinator::GetLimits(const v1::GetLimitsRequest& request,
                                                             rpc::CallContext* context) {
  ASSIGN_OR_RETURN(auto model, registry_.FindByName(request.model(), context));
  // They may have been changed at another coordinator just now.
  const auto now = registry_.FindAnew(model->id, context);
  if (now.ok()) model = *now;
  return model->observed->Limits(model->PlanNow());
}

v1::GetStatusResponse Coordinator::GetStatus(rpc::CallContext* context) {
  v1::GetStatusResponse response;
  response.set_version(EMBERD_VERSION);
  response.set_uptime_ms(absl::ToInt64Milliseconds(uptime()));
  response.set_batches(static_cast<int>(path_.batches().count()));
  response.set_batch_bytes(path_.batches().bytes());
  for (const ModelRegistry::Known& known : registry_.models()) {
    const step::ServedModelPtr& model = known.model;
    v1::ModelStatus* status = response.add_models();
    status->set_history(model->history);
    status->set_lost(known.lost);
    status->set_recovery(auto_checkpoints_.RecoveryOf(model->config.name()));
    status->set_serves(step::ServesText(model->serves));
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
  rpc::CallContext context(SteadyNow() + kStatusDeadline, caller->trace());
  for (size_t i = 0; i < shards_.size(); ++i) shards->Add();
  internal::v1::GetShardStatusRequest request;
  request.set_hot_rows(hot_rows);
  const auto add = [&](int shard) {
    auto status = shards_[shard].GetStatus(request, &context);
    v1::ShardStatus& to = *shards->Mutable(shard);
    if (status.ok()) to = std::move(*status);
    to.set_index(shard);
    to.set_address(shards_[shard].address());
    to.set_http_address(shard_http_addresses_[shard]);
    to.set_reachable(status.ok());
    if (!status.ok()) to.set_error(std::string(status.status().message()));
    resources_.metrics->ShardLink(shard)->SetReachable(status.ok());
    return status.status();
  };
  shards_.OnAll(add).IgnoreError();  // stands in the status
}

void Coordinator::AddStacks(v1::GetStatsResponse* stats) const {
  for (const ModelRegistry::Known& known : registry_.models()) {
    for (v1::StackStats& stack : known.model->observed->Stats(known.model->PlanNow())) {
      stack.set_model(known.model->config.name());
      *stats->add_stacks() = std::move(stack);
    }
  }
}

// What operators do with the memory of the shards' SparseCores: each shard does it, and a pin that
// one of them refuses is taken back on the others.

absl::StatusOr<v1::ChangeMemoryResponse> Coordinator::ChangeMemory(
    const v1::ChangeMemoryRequest& request, rpc::CallContext* context) {
  RETURN_IF_ERROR(host::CheckMemoryChange(request));
  v1::ChangeMemoryResponse response;
  for (size_t i = 0; i < shards_.size(); ++i) response.add_shards();
  const absl::Status status = shards_.OnAll([&](int shard) {
    const auto change = shards_[shard].ChangeMemory(request, context);
    if (change.ok()) *response.mutable_shards(shard) = *change;
    return change.status();
  });
  if (status.ok()) return response;
  if (request.operation() == v1::ChangeMemoryRequest::PIN) TakePinBack(request, response, context);
  // In the words of all other calls, if nobody has declared it, or it is lost.
  if (absl::IsNotFound(status)) {
    RETURN_IF_ERROR(registry_.FindByName(request.model(), context).status());
  }
  return status;
}

void Coordinator::TakePinBack(const v1::ChangeMemoryRequest& pin,
                              const v1::ChangeMemoryResponse& done, rpc::CallContext* caller) {
  v1::ChangeMemoryRequest unpin = pin;
  unpin.set_operation(v1::ChangeMemoryRequest::UNPIN);
  std::vector<int> pinned;
  for (int shard = 0; shard < done.shards_size(); ++shard) {
    if (done.shards(shard).changed()) pinned.push_back(shard);
  }
  rpc::CallContext context(SteadyNow() + kUnpinDeadline, caller->trace());
  const auto take_back = [&](int shard) {
    const absl::Status status = shards_[shard].ChangeMemory(unpin, &context).status();
    if (!status.ok()) {
      ops::Log(ops::LogLevel::kWarning, "a model stays pinned on a shard, though not on all",
               {{"model", pin.model()}, {"reason", status.message()}});
    }
    return status;
  };
  shards_.On(pinned, take_back).IgnoreError();  // it is in the log
}

}  // namespace emberd::coordinator
