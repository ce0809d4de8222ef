// One shard without its transport: models, the batches kept between Gather and Apply, and the
// record of what was applied, around an engine. Served by shard_server.h behind gRPC, and by
// local_shard.cc in the coordinator's own process.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/periodic_task.h"
#include "base/thread_pools.h"
#include "emberd/v1/cluster.pb.h"
#include "server/ops/metrics.h"
#include "server/rpc/handle_store.h"
#include "server/shard/group_steps.h"
#include "server/shard/hosted_models.h"
#include "server/shard/memory_guard.h"
#include "server/shard/mutation_record.h"
#include "server/shard/shard_backend.h"
#include "shard/engine.h"

namespace emberd::server {

// Thread-safe. Callbacks run on a thread of the host or of its engine and must be short.
class ShardHost {
 public:
  // `cluster` is complete (config::CompleteCluster). `metrics` and `threads` must
  // outlive the host.
  static absl::StatusOr<std::unique_ptr<ShardHost>> Create(const v1::ClusterConfig& cluster,
                                                           int shard_index, ops::Metrics* metrics,
                                                           ThreadPools* threads);
  // Finishes work in progress.
  ~ShardHost();

  uint64_t incarnation() const { return incarnation_; }
  int sparsecores_per_shard() const { return place_.sparsecores_per_shard; }
  ops::ServerMetrics* metrics() { return server_metrics_; }
  // Calls that take longer are logged.
  absl::Duration slow_call() const { return slow_call_; }

  absl::StatusOr<internal::v1::CreateModelResponse> CreateModel(
      const internal::v1::CreateModelRequest& request);
  absl::StatusOr<internal::v1::FindModelResponse> FindModel(
      const internal::v1::FindModelRequest& request) {
    return models_.Find(request);
  }
  absl::Status DropModel(uint64_t model_id);

  using GatherCallback = std::function<void(absl::StatusOr<GatherResult>)>;
  void Gather(GatherCommand command, GatherCallback done);

  absl::StatusOr<internal::v1::OpenGroupResponse> OpenGroup(
      const internal::v1::OpenGroupRequest& request);
  using RowsCallback = std::function<void(absl::StatusOr<RowCounts>)>;
  void DecideStep(const internal::v1::DecideStepRequest& request, RowsCallback done) {
    group_steps_.Decide(request, std::move(done));
  }

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

  ShardHost(const v1::ClusterConfig& cluster, int shard_index, ops::Metrics* metrics,
            BlockingPool* threads, std::unique_ptr<shard::Engine> engine);

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
  static absl::Status WrongModel(uint64_t batch_handle, const KeptBatch& kept);
  absl::StatusOr<StagedApply> StagePart(ApplyCommand command);
  void AddReceivedBytes(uint64_t model_id, const shard::CheckedPart& part);
  // RESOURCE_EXHAUSTED: touching the rows of a batch, or of a selection, for the first time would
  // take memory that is not there.
  template <typename Rows>
  absl::Status CheckMemory(uint64_t model_id, const Rows& rows);
  // Says in the log what could not be held if every row were touched.
  void WarnOfMemory(const std::string& model) const;

  const ShardPlace place_;
  const uint64_t incarnation_;
  const absl::Time start_;
  const absl::Duration slow_call_;
  const int64_t table_budget_bytes_;
  ops::Metrics* const metrics_;
  ops::ServerMetrics* const server_metrics_;
  const std::vector<ops::PartitionMetrics> partition_metrics_;  // of this shard
  std::vector<shard::PartitionStatistics> counted_partitions_;  // what the sweeper has added

  MemoryGuard memory_;
  HandleStore<KeptBatch> batches_;
  MutationRecord record_;

  // Before the engine, whose last callbacks use them.
  HostedModels models_;
  GroupSteps group_steps_;
  std::unique_ptr<shard::Engine> engine_;
  TaskQueue workers_;
  PeriodicTask sweeper_;
};

}  // namespace emberd::server
