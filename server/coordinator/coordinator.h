// A coordinator without its transport: validates requests, preprocesses batches, fans out to the
// shards and puts their answers together. It holds no model state: any number of coordinators may
// serve the same shards.
// See docs/words.md for the words, and docs/rejected.md for what is not done.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/periodic_task.h"
#include "base/regions.h"
#include "base/steady_time.h"
#include "base/thread_pools.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/cluster.pb.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/coordinator/auto_checkpoints.h"
#include "server/coordinator/checkpoints.h"
#include "server/coordinator/model_registry.h"
#include "server/coordinator/resources.h"
#include "server/coordinator/unary_calls.h"
#include "server/host/collective_router.h"
#include "server/ops/metrics.h"
#include "server/rpc/call_context.h"
#include "server/step/shard_set.h"
#include "server/step/step.h"

namespace emberd::coordinator {

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
  v1::GetStatusResponse GetStatus(rpc::CallContext* context);
  // Adds the state of every shard, as far as it answers within a second, with `hot_rows` rows of
  // each table.
  void AddShards(int hot_rows, rpc::CallContext* context,
                 google::protobuf::RepeatedPtrField<v1::ShardStatus>* shards);
  // Adds what the batches of every model needed.
  void AddStacks(v1::GetStatsResponse* stats) const;
  absl::StatusOr<v1::GetLimitsResponse> GetLimits(const v1::GetLimitsRequest& request,
                                                  rpc::CallContext* context);
  absl::StatusOr<v1::ChangeMemoryResponse> ChangeMemory(const v1::ChangeMemoryRequest& request,
                                                        rpc::CallContext* context);

  RegionServer* regions() { return regions_.get(); }  // null: no memory is shared with clients
  AutoCheckpoints* auto_checkpoints() { return &auto_checkpoints_; }
  absl::Duration uptime() const { return SteadyNow() - start_; }
  const CoordinatorResources& resources() const { return resources_; }

 private:
  void Sweep();
  // On the shards that have pinned a model, as `done` says.
  void TakePinBack(const v1::ChangeMemoryRequest& pin, const v1::ChangeMemoryResponse& done,
                   rpc::CallContext* caller);

  const step::ShardSet shards_;
  host::CollectiveRouter collective_;
  const std::vector<std::string> shard_http_addresses_;
  const absl::Time start_;
  ModelRegistry registry_;
  step::Mutations mutations_;
  const std::unique_ptr<RegionServer> regions_;
  step::StepPath path_;
  Checkpoints checkpoints_;
  AutoCheckpoints auto_checkpoints_;
  int sweeps_ = 0;
  UnarySteps steps_;
  RowAccess rows_;
  const CoordinatorResources resources_;
  PeriodicTask sweeper_;
  PeriodicTask watch_;  // apart from the sweeper, since it waits for shards
};

}  // namespace emberd::coordinator
