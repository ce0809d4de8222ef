// One shard without its transport: models, the batches kept between Gather and Apply, and the
// record of what was applied, around an engine. Served by shard_server.h behind gRPC, and by
// shard_backend.cc in the coordinator's own process.
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
#include "base/status.h"
#include "base/steady_time.h"
#include "base/thread_pools.h"
#include "emberd/v1/cluster.pb.h"
#include "server/host/group_steps.h"
#include "server/host/hosted_models.h"
#include "server/host/log/durable_log.h"
#include "server/host/log/shard_log.h"
#include "server/host/mutation_votes.h"
#include "server/host/shard_backend.h"
#include "server/host/shard_checkpoints.h"
#include "server/ops/metrics.h"
#include "server/rpc/budgets.h"
#include "server/rpc/message.h"
#include "shard/engine.h"

namespace emberd::host {

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

  // UNAVAILABLE, with the progress, while the shard reads its log; FAILED_PRECONDITION if that
  // failed. Nothing but GetStatus may be called before it is OK.
  absl::Status CheckReady() const { return durable_.CheckReady(); }
  // Whether it is ready, or never will be, within `limit`.
  bool WaitUntilReady(absl::Duration limit = absl::InfiniteDuration()) {
    return durable_.Wait(limit);
  }
  // Makes it end soon if it is not.
  void Cancel() { durable_.Cancel(); }

  int sparsecores_per_shard() const { return place_.sparsecores_per_shard; }
  ops::ServerMetrics* metrics() { return server_metrics_; }
  // Of messages that come. They share the memory with what is held and what is being sent.
  const rpc::MessageLimits& limits() const { return limits_; }
  // Calls that take longer are logged.
  absl::Duration slow_call() const { return slow_call_; }

  absl::StatusOr<internal::v1::CreateModelResponse> CreateModel(
      const internal::v1::CreateModelRequest& request);
  absl::StatusOr<internal::v1::FindModelResponse> FindModel(
      const internal::v1::FindModelRequest& request) {
    return models_.Find(request);
  }
  absl::Status ServeModel(const internal::v1::ServeModelRequest& request) {
    RETURN_IF_ERROR(models_.Serve(request));
    return log_.WaitDurable();
  }
  internal::v1::ListModelsResponse ListModels() const { return models_.List(); }
  absl::Status DropModel(const internal::v1::DropModelRequest& request) {
    RETURN_IF_ERROR(models_.Drop(request));
    if (!request.unless_serving()) checkpoints_.ForgetFinished(request.model_id());
    return log_.WaitDurable();
  }

  using GatherCallback = std::function<void(absl::StatusOr<GatherResult>)>;
  // A tiny one is done on the caller's thread, others on workers.
  void Gather(GatherCommand command, GatherCallback done);

  absl::StatusOr<internal::v1::OpenGroupResponse> OpenGroup(
      const internal::v1::OpenGroupRequest& request);
  using RowsCallback = std::function<void(absl::StatusOr<RowCounts>)>;
  void DecideStep(const internal::v1::DecideStepRequest& request, RowsCallback done) {
    // A decision about rows that are gone must not reach the rows that are here now.
    const absl::Status status = models_.Check(request.model_id(), request.history());
    if (!status.ok()) return done(status);
    group_steps_.Decide(request, log_.AfterDurable(std::move(done)));
  }
  absl::StatusOr<internal::v1::DropGroupsResponse> DropGroups(
      const internal::v1::DropGroupsRequest& request) {
    RETURN_IF_ERROR(models_.Check(request.model_id(), request.history()));
    ASSIGN_OR_RETURN(auto response, group_steps_.DropGroups(request));
    RETURN_IF_ERROR(log_.WaitDurable());
    return response;
  }

  // Names an Apply that was checked and waits for its decision: the host holds it, whoever goes
  // away.
  struct StagedApply {
    StageOutcome outcome;
    uint64_t model_id = 0;
    Mutation mutation;
    uint64_t attempt = 0;
    std::optional<GroupPart> group_part;
  };
  using StageCallback = std::function<void(absl::StatusOr<StagedApply>)>;
  void Stage(ApplyCommand command, StageCallback done);
  void Commit(const StagedApply& staged, RowsCallback done);
  // A part of a group stays with the group's step.
  void Discard(const StagedApply& staged);

  void RenewBatch(uint64_t batch_handle, absl::Duration batch_ttl) {
    batches_.Renew(batch_handle, SteadyNow() + batch_ttl);
  }
  absl::Status ReleaseBatch(uint64_t model_id, uint64_t batch_handle);

  using DoneCallback = std::function<void(absl::Status)>;
  void ReadRows(const shard::RowSelection& selection, absl::Span<float> values, DoneCallback done);
  // See ShardBackend. The command's owner keeps all that it refers to.
  using AssignCallback = std::function<void(absl::StatusOr<bool>)>;
  void StageAssign(AssignCommand command, AssignCallback done);
  void FindMutation(const Mutation& mutation, uint64_t attempt, MutationVotes::FoundCallback done) {
    votes_.Find(mutation, attempt, log_.AfterDurable(std::move(done)));
  }
  void DecideMutation(const Mutation& mutation, uint64_t attempt, bool commit, RowsCallback done) {
    votes_.Decide(mutation, attempt, commit, log_.AfterDurable(std::move(done)));
  }
  absl::StatusOr<internal::v1::ListMadeResponse> ListMade(
      const internal::v1::ListMadeRequest& request);
  std::vector<Mutation> Undecided(absl::Duration older_than) const {
    return votes_.Undecided(SteadyNow() - older_than);
  }

  ChangeGate& gate() { return gate_; }
  ShardCheckpoints& checkpoints() { return checkpoints_; }

  // With `hot_rows` rows of each table, 0 to 100. Takes as long as HugePageBytes
  // (server/ops/metrics.h).
  v1::ShardStatus GetStatus(int hot_rows = 0) const;

  // AdminService.ChangeMemory on this shard. May take as long as models take to move.
  absl::StatusOr<v1::ShardMemoryChange> ChangeMemory(const v1::ChangeMemoryRequest& request);

 private:
  struct KeptBatch {
    uint64_t model_id = 0;
    std::shared_ptr<const shard::Batch> batch;
    std::shared_ptr<const void> room;  // on the SparseCores
  };

  ShardHost(const v1::ClusterConfig& cluster, int shard_index, ops::Metrics* metrics,
            BlockingPool* threads, std::unique_ptr<shard::Engine> engine);

  // Counts the rows of an update.
  void AddUpdate(uint64_t model_id, const shard::ApplyResult& result);
  // Drops expired batches and brings up to date what is read from the engine.
  void Sweep();
  void ShowHotRows();
  // By the memory manager, which must be there.
  absl::StatusOr<v1::ShardMemoryChange> MakeMemoryChange(const v1::ChangeMemoryRequest& request);
  // Runs on a worker, or answers RESOURCE_EXHAUSTED at once.
  absl::Status Submit(std::function<void()> work);
  void GatherOnWorker(GatherCommand command, const GatherCallback& done);
  absl::StatusOr<StagedApply> StageOnWorker(ApplyCommand command);
  absl::StatusOr<bool> StageAssignNow(const AssignCommand& command);
  // Claims the batch of the command and checks the command's input, which it uses up.
  absl::StatusOr<std::shared_ptr<const shard::CheckedPart>> ClaimChecked(ApplyCommand& command);
  static absl::Status WrongModel(uint64_t batch_handle, const KeptBatch& kept);
  // An update on its own, and a part of a group's step.
  absl::StatusOr<StageOutcome> StageUpdate(ApplyCommand& command);
  absl::StatusOr<StageOutcome> StagePart(ApplyCommand& command);
  // An update of the batch, and an assignment, as what is voted on.
  MutationVotes::Change ChangeOf(uint64_t model_id, uint64_t batch_handle,
                                 std::shared_ptr<const shard::CheckedPart> part);
  absl::StatusOr<MutationVotes::Change> ChangeOf(const AssignCommand& command);
  absl::StatusOr<std::optional<RowCounts>> Vote(const ApplyCommand& command,
                                                std::shared_ptr<const shard::CheckedPart> part);
  // Begins a segment of the log with what is known now, and calls `at_moment` where it begins,
  // while no change is on its way; its error is returned, and there is no segment. 0: there is no
  // log.
  absl::StatusOr<uint64_t> BeginLogSegment(const std::function<absl::Status()>& at_moment);
  void DescribeForLog(uint64_t segment, internal::v1::LogState* state) const;
  void AddReceivedBytes(uint64_t model_id, const shard::CheckedPart& part);
  // RESOURCE_EXHAUSTED: touching the rows of a batch, or of a selection, for the first time would
  // take memory that is not there.
  template <typename Rows>
  absl::StatusOr<rpc::MemoryRoom> CheckMemory(uint64_t model_id, const Rows& rows);
  // Says in the log what does not fit if every row is touched.
  void WarnOfMemory(const std::string& model) const;

  const ShardPlace place_;
  const uint64_t incarnation_;
  const absl::Time start_;
  const absl::Duration slow_call_;
  const int64_t table_budget_bytes_;
  const int64_t host_budget_bytes_;  // of evicted rows, for each SparseCore
  ops::Metrics* const metrics_;
  ops::ServerMetrics* const server_metrics_;
  std::vector<ops::LabelledMetrics> partition_metrics_;  // of this shard; the sweeper's

  const rpc::MessageLimits limits_;
  rpc::MemoryGuard memory_;
  rpc::HandleStore<KeptBatch> batches_;

  // Before the engine, whose last callbacks use them.
  ShardLog log_;
  HostedModels models_;
  Sequencer order_;
  MutationVotes votes_;
  GroupSteps group_steps_;
  std::unique_ptr<shard::Engine> engine_;
  ChangeGate gate_;  // outlives the workers, who may hold its passes
  ShardCheckpoints checkpoints_;
  TaskQueue workers_;
  DurableLog durable_;  // reads the log on a thread of its own
  PeriodicTask sweeper_;
};

}  // namespace emberd::host
