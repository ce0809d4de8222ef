// A coordinator without its transport: validates requests, preprocesses batches, fans out to the
// shards and puts their answers together. It holds no model state: any number of coordinators may
// serve the same shards.
// See docs/words.md for the words, and docs/rejected.md for what is not done.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/blocking_pool.h"
#include "base/periodic_task.h"
#include "base/region_server.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/cluster.pb.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/coordinator/auto_checkpoints.h"
#include "server/coordinator/checkpoints.h"
#include "server/coordinator/model_registry.h"
#include "server/group/collective_router.h"
#include "server/host/mutation_record.h"
#include "server/ops/metrics.h"
#include "server/rpc/call_context.h"
#include "server/step/fanout.h"
#include "server/step/lookup_response.h"
#include "server/step/shard_set.h"
#include "server/step/step.h"

namespace emberd::coordinator {

// What training streams and operators work with besides the unary calls.
struct CoordinatorResources {
  std::string identity;  // one string per life of the process
  ModelRegistry* registry = nullptr;
  step::Fanout* fanout = nullptr;
  step::StepPath* path = nullptr;
  Checkpoints* checkpoints = nullptr;
  group::CollectiveRouter* collective = nullptr;
  ops::Metrics* metrics = nullptr;
  absl::Duration shard_call;  // time for what is asked of shards
  absl::Duration slow_step;   // steps that take longer are logged
};

// Thread-safe. Methods block until the answer is there; `context` carries the caller's deadline and
// cancellation. Errors and their codes: see emberd/v1/embedding_service.proto.
class Coordinator {
 public:
  // `cluster` is complete; `shards[i]` is its shard i. `metrics` and `threads` must outlive the
  // coordinator.
  Coordinator(const v1::ClusterConfig& cluster, int index,
              std::vector<std::shared_ptr<host::ShardBackend>> shards, ops::Metrics* metrics,
              ThreadPools* threads);

  absl::StatusOr<v1::DeclareModelResponse> DeclareModel(const v1::DeclareModelRequest& request,
                                                        rpc::CallContext* context);
  absl::StatusOr<v1::DropModelResponse> DropModel(const v1::DropModelRequest& request,
                                                  rpc::CallContext* context);
  absl::StatusOr<v1::ResetModelResponse> ResetModel(const v1::ResetModelRequest& request,
                                                    rpc::CallContext* context);
  absl::StatusOr<v1::DropGroupResponse> DropGroup(const v1::DropGroupRequest& request,
                                                  rpc::CallContext* context);
  // Also of a lost model.
  absl::StatusOr<v1::DescribeModelResponse> DescribeModel(const v1::DescribeModelRequest& request,
                                                          rpc::CallContext* context);
  absl::StatusOr<step::LookupOutput> Lookup(const v1::LookupRequest& request,
                                            rpc::CallContext* context);
  // For callers who may not train. PERMISSION_DENIED for a lookup that would keep a batch.
  absl::StatusOr<step::LookupOutput> LookupForReader(const v1::LookupRequest& request,
                                                     rpc::CallContext* context);
  absl::StatusOr<v1::ApplyGradientsResponse> ApplyGradients(
      const v1::ApplyGradientsRequest& request, rpc::CallContext* context);
  absl::StatusOr<v1::ReleaseBatchResponse> ReleaseBatch(const v1::ReleaseBatchRequest& request,
                                                        rpc::CallContext* context);
  absl::StatusOr<v1::ReadRowsResponse> ReadRows(const v1::ReadRowsRequest& request,
                                                rpc::CallContext* context);
  absl::StatusOr<v1::AssignRowsResponse> AssignRows(const v1::AssignRowsRequest& request,
                                                    rpc::CallContext* context);

  class Export;  // row_access.h
  absl::StatusOr<std::unique_ptr<Export>> StartExport(const v1::ExportTableRequest& request,
                                                      rpc::CallContext* context);

  v1::GetStatusResponse GetStatus(rpc::CallContext* context);
  // Adds the state of every shard, as far as it answers within a second, with `hot_rows` rows of
  // each table.
  void AddShards(int hot_rows, rpc::CallContext* context,
                 google::protobuf::RepeatedPtrField<v1::ShardStatus>* shards);
  // Adds what the batches of every model needed.
  void AddStacks(v1::GetStatsResponse* stats) const;
  absl::StatusOr<v1::GetLimitsResponse> GetLimits(const v1::GetLimitsRequest& request,
                                                  rpc::CallContext* context);

  absl::StatusOr<v1::SetLimitsResponse> SetLimits(const v1::SetLimitsRequest& request,
                                                  rpc::CallContext* context);
  absl::StatusOr<v1::ChangeMemoryResponse> ChangeMemory(const v1::ChangeMemoryRequest& request,
                                                        rpc::CallContext* context);

  RegionServer* regions() { return regions_.get(); }  // null: no memory is shared with clients
  AutoCheckpoints* auto_checkpoints() { return &auto_checkpoints_; }
  ops::ServerMetrics* server_metrics() { return server_metrics_; }
  ops::Metrics* metrics() { return metrics_; }
  absl::Duration uptime() const { return SteadyNow() - start_; }
  absl::Duration default_deadline() const { return resources_.shard_call; }
  const CoordinatorResources& resources() const { return resources_; }

 private:
  void Sweep();
  // Calls call(model), and explains a DATA_LOSS. A model that was reset or declared again since
  // this coordinator heard of it, or serves another checkpoint, is called again.
  template <typename Call>
  auto OnModel(uint64_t model_id, rpc::CallContext* context, const Call& call)
      -> decltype(call(std::shared_ptr<const step::ServedModel>()));

  absl::StatusOr<v1::Tensor> ReadTableRows(const step::ServedModel& model,
                                           const struct RowTarget& target,
                                           const preprocess::IntSpan& ids,
                                           rpc::CallContext* context);
  // To `data`, row by row in the order of the ids.
  absl::Status ReadRowsTo(const step::ServedModel& model, const struct RowTarget& target,
                          absl::Span<const int64_t> ids, char* data, rpc::CallContext* context);

  // On the shards that have pinned a model, as `done` says.
  void TakePinBack(const v1::ChangeMemoryRequest& pin, const v1::ChangeMemoryResponse& done,
                   rpc::CallContext* caller);
  // One attempt at an assignment; command i is for shard i.
  absl::StatusOr<step::MadeMutation> TryAssign(const std::vector<host::AssignCommand>& commands,
                                               rpc::CallContext* context);

  const step::ShardSet shards_;
  group::CollectiveRouter collective_;
  const std::vector<std::string> shard_http_addresses_;
  const int sparsecores_per_shard_;
  const int64_t max_message_bytes_;
  const absl::Time start_;
  ops::Metrics* const metrics_;
  ops::ServerMetrics* const server_metrics_;
  ModelRegistry registry_;
  step::Mutations mutations_;
  step::Fanout fanout_;
  const std::unique_ptr<RegionServer> regions_;
  step::StepPath path_;
  Checkpoints checkpoints_;
  AutoCheckpoints auto_checkpoints_;
  int sweeps_ = 0;
  const CoordinatorResources resources_;
  PeriodicTask sweeper_;
  PeriodicTask watch_;  // apart from the sweeper, since it waits for shards
};

template <typename Call>
auto Coordinator::OnModel(uint64_t model_id, rpc::CallContext* context, const Call& call)
    -> decltype(call(std::shared_ptr<const step::ServedModel>())) {
  for (int calls_left = 3; calls_left >= 0; --calls_left) {
    ASSIGN_OR_RETURN(const auto model, registry_.Find(model_id, context));
    auto result = call(model);
    if (result.ok()) return result;
    absl::Status status = registry_.Explain(model->id, model->history, result.status());
    if (calls_left == 0 || !absl::IsAborted(status) || absl::IsAborted(result.status()))
      return status;
  }
  return absl::InternalError("unreachable");
}

}  // namespace emberd::coordinator
