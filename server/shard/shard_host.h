// One shard without its transport: models, the batches kept between Gather and Apply, and the
// record of what was applied, around an engine. Behind gRPC it is served by shard_service.h; in one
// process by local_shard.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/blocking_pool.h"
#include "base/periodic_task.h"
#include "emberd/v1/cluster.pb.h"
#include "server/ops/metrics.h"
#include "server/rpc/handle_store.h"
#include "server/shard/group_steps.h"
#include "server/shard/mutation_record.h"
#include "server/shard/shard_backend.h"
#include "shard/engine.h"

namespace emberd::server {

// Thread-safe. Callbacks run on a thread of the host or of its engine and must be short.
class ShardHost {
 public:
  // `cluster` is complete (config::CompleteCluster). `metrics` must outlive the host.
  static absl::StatusOr<std::unique_ptr<ShardHost>> Create(const v1::ClusterConfig& cluster,
                                                           int shard_index, ops::Metrics* metrics);
  // Finishes work in progress.
  ~ShardHost();

  uint64_t incarnation() const { return incarnation_; }
  int sparsecores_per_shard() const { return sparsecores_per_shard_; }
  ops::ServerMetrics* metrics() { return server_metrics_; }
  // Calls that take longer are logged.
  absl::Duration slow_call() const { return slow_call_; }

  absl::StatusOr<internal::v1::CreateModelResponse> CreateModel(
      const internal::v1::CreateModelRequest& request);
  absl::StatusOr<internal::v1::FindModelResponse> FindModel(
      const internal::v1::FindModelRequest& request);
  absl::Status DropModel(uint64_t model_id);

  using GatherCallback = std::function<void(absl::StatusOr<GatherResult>)>;
  void Gather(GatherCommand command, GatherCallback done);

  absl::StatusOr<internal::v1::OpenGroupResponse> OpenGroup(
      const internal::v1::OpenGroupRequest& request);
  using RowsCallback = std::function<void(absl::StatusOr<RowCounts>)>;
  void DecideStep(const internal::v1::DecideStepRequest& request, RowsCallback done);

  // An Apply that was checked and waits for its decision. It holds its batch and its mutation; a
  // group's part is held by the group's step instead, and Discard leaves it there.
  class StagedApply {
   public:
    StagedApply() = default;
    const StageOutcome& outcome() const { return outcome_; }

   private:
    friend class ShardHost;
    StageOutcome outcome_;
    ApplyCommand command_;
    std::shared_ptr<const shard::CheckedPart> part_;
  };
  using StageCallback = std::function<void(absl::StatusOr<StagedApply>)>;
  void Stage(ApplyCommand command, StageCallback done);
  // Exactly one of the two for every StagedApply that was not replayed.
  void Commit(StagedApply staged, RowsCallback done);
  void Discard(StagedApply staged);

  absl::Status ReleaseBatch(uint64_t model_id, uint64_t batch_handle);

  using DoneCallback = std::function<void(absl::Status)>;
  void ReadRows(const shard::RowSelection& selection, absl::Span<float> values, DoneCallback done);
  using AssignCallback = std::function<void(absl::StatusOr<bool>)>;
  void AssignRows(const shard::RowSelection& selection, absl::Span<const float> values,
                  Mutation mutation, AssignCallback done);

  // With `hot_rows` rows of each table, 0 to 100. Takes as long as HugePageBytes
  // (process_metrics.h).
  v1::ShardStatus GetStatus(int hot_rows = 0) const;

 private:
  struct KeptBatch {
    uint64_t model_id = 0;
    std::shared_ptr<const shard::Batch> batch;
  };
  struct Model {
    v1::ModelConfig config;
    ops::ShardModelMetrics* metrics = nullptr;
  };

  ShardHost(const v1::ClusterConfig& cluster, int shard_index, ops::Metrics* metrics,
            std::unique_ptr<shard::Engine> engine);

  absl::Status CheckPlace(const internal::v1::CreateModelRequest& request) const;
  ops::ShardModelMetrics* ModelMetrics(uint64_t model_id) const;
  // Counts the rows of an update.
  void AddUpdate(uint64_t model_id, const shard::ApplyResult& result);
  // Drops expired batches and brings up to date what is read from the engine.
  void Sweep();
  void ShowHotRows();
  void CountPartitions(const shard::EngineStatistics& statistics);
  // Runs on a worker, or answers RESOURCE_EXHAUSTED at once.
  absl::Status Submit(std::function<void()> work);
  void GatherOnWorker(GatherCommand command, const GatherCallback& done);
  absl::StatusOr<StagedApply> StageOnWorker(ApplyCommand command);
  // Claims the batch of the command and checks the command's input, which it uses up.
  absl::StatusOr<std::shared_ptr<const shard::CheckedPart>> ClaimChecked(ApplyCommand& command);
  absl::StatusOr<StagedApply> StagePart(ApplyCommand command);
  void AddReceivedBytes(uint64_t model_id, const shard::CheckedPart& part);

  const int shards_;
  const int sparsecores_per_shard_;
  const int shard_index_;
  const uint64_t incarnation_;
  const absl::Time start_;
  const absl::Duration slow_call_;
  const int64_t table_budget_bytes_;
  ops::Metrics* const metrics_;
  ops::ServerMetrics* const server_metrics_;
  const std::vector<ops::PartitionMetrics> partition_metrics_;  // of this shard
  std::vector<shard::PartitionStatistics> counted_partitions_;  // what the sweeper has added

  HandleStore<KeptBatch> batches_;
  MutationRecord record_;

  mutable absl::Mutex mutex_;
  absl::flat_hash_map<uint64_t, Model> models_ ABSL_GUARDED_BY(mutex_);

  GroupSteps group_steps_;  // before the engine, whose last callbacks come here
  std::unique_ptr<shard::Engine> engine_;
  BlockingPool workers_;
  PeriodicTask sweeper_;
};

}  // namespace emberd::server
