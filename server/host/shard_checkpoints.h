// What one shard does for checkpoints: it holds back changes while their moment is fixed, writes
// the rows of that moment, and makes models of rows that were written. See shard_service.proto and
// docs/checkpoint.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/steady_time.h"
#include "base/thread_pools.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/internal/v1/shard_state.pb.h"
#include "server/host/group_steps.h"
#include "server/host/hosted_models.h"
#include "server/host/log/shard_log.h"
#include "server/host/mutation_votes.h"
#include "server/host/row_files.h"
#include "server/host/shard_backend.h"
#include "server/rpc/budgets.h"
#include "shard/engine.h"

namespace emberd::host {

// Thread-safe.
class ShardCheckpoints {
 public:
  // What it works with; must outlive it.
  struct Parts {
    shard::Engine* engine = nullptr;
    HostedModels* models = nullptr;
    MutationVotes* votes = nullptr;
    GroupSteps* groups = nullptr;
    ChangeGate* gate = nullptr;
    rpc::MemoryGuard* memory = nullptr;
    BlockingPool* threads = nullptr;
    ShardLog* log = nullptr;
    // Begins a segment of the log, so that checkpoints are of its beginning. 0: there is no log.
    // `at_moment` runs where it begins.
    std::function<absl::StatusOr<uint64_t>(const std::function<absl::Status()>& at_moment)>
        begin_segment;
  };
  // `copy_bytes`: of rows that change while they are being saved.
  ShardCheckpoints(const ShardPlace& place, int64_t copy_bytes, const Parts& parts)
      : place_(place),
        copy_bytes_(copy_bytes),
        parts_(parts),
        saves_(parts.threads, 64, 0),
        restores_(parts.threads, 2, 64) {}
  // Gives up what is under way.
  ~ShardCheckpoints();

  absl::StatusOr<internal::v1::PauseChangesResponse> PauseChanges(
      const internal::v1::PauseChangesRequest& request);
  absl::Status ResumeChanges(const internal::v1::ResumeChangesRequest& request) {
    parts_.gate->Resume(request.model_id(), request.pause_id());
    return absl::OkStatus();
  }
  absl::Status BeginSave(const internal::v1::BeginSaveRequest& request);
  absl::Status CompleteSave(const internal::v1::CompleteSaveRequest& request);
  absl::Status BeginRestore(const internal::v1::BeginRestoreRequest& request);
  absl::StatusOr<internal::v1::GetTransferResponse> GetTransfer(
      const internal::v1::GetTransferRequest& request);
  absl::Status CancelTransfer(const internal::v1::CancelTransferRequest& request) {
    GiveUp(request.transfer_id());
    return absl::OkStatus();
  }
  // The model begins anew, or is dropped: what has finished is no longer in its groups.
  void ForgetFinished(uint64_t model_id) {
    absl::MutexLock lock(&mutex_);
    finished_.erase(model_id);
  }
  // Gives up what nobody asks about.
  void Sweep(absl::Time now);

 private:
  // A save or restore.
  struct Transfer {
    uint64_t model_id = 0;
    uint64_t history = 0;
    std::vector<internal::v1::BeginSaveRequest> saves = {};  // none: it is a restore
    uint64_t segment = 0;                       // of a save: of the log, which begins here
    std::shared_ptr<shard::Snapshot> snapshot;  // of a save, until it is over
    ShardProgress progress;
    absl::Mutex mutex;
    absl::Time asked ABSL_GUARDED_BY(mutex) = SteadyNow();
    internal::v1::GetTransferResponse state ABSL_GUARDED_BY(mutex);
  };
  using TransferPtr = std::shared_ptr<Transfer>;
  using State = internal::v1::GetTransferResponse::State;

  void GiveUp(uint64_t transfer_id);
  // Runs `work` on a thread, and keeps its result. RESOURCE_EXHAUSTED: too many are under way.
  absl::Status Start(uint64_t transfer_id, TransferPtr transfer,
                     std::function<absl::Status(Transfer&)> work);
  // ABORTED: another save of the model is under way.
  absl::Status MakeWayForSave(uint64_t model_id);
  // ABORTED unless all is as it was when the pause had settled.
  absl::Status CheckSettled(const internal::v1::BeginSaveRequest& request);
  // Ends the snapshot of a save.
  void End(Transfer& transfer, bool kept);
  absl::Status Save(const std::vector<internal::v1::ShardState>& states, Transfer& transfer);
  // The model that a restore fills. RESOURCE_EXHAUSTED, with the figures, if it does not fit.
  absl::StatusOr<std::shared_ptr<shard::Model>> Reserve(
      const internal::v1::BeginRestoreRequest& request, const shard::ModelSpec& spec);
  absl::Status Restore(const internal::v1::BeginRestoreRequest& request,
                       const std::shared_ptr<shard::Model>& model, Transfer& transfer);

  const ShardPlace place_;
  const int64_t copy_bytes_;
  const Parts parts_;
  absl::Mutex mutex_;
  absl::flat_hash_map<uint64_t, TransferPtr> transfers_ ABSL_GUARDED_BY(mutex_);
  // By model, groups that had finished before a restore that is not over, or came to nothing.
  absl::flat_hash_map<uint64_t, std::set<std::string>> finished_ ABSL_GUARDED_BY(mutex_);
  // No save waits for its turn: while nobody reads its snapshot, updates of the model wait for room
  // for copies, and hold the threads with which others read. Last: its destructor waits for what
  // uses the rest.
  TaskQueue saves_;
  TaskQueue restores_;  // and checks of files
};

}  // namespace emberd::host
