// What storage.durability means to coordinators. CHECKPOINT: models are saved by themselves, and a
// model that has lost rows goes back to its newest intact checkpoint, on all shards together.
// LOG: models are saved when a shard's log is long; rows are never taken back to a checkpoint, for
// they come back from the logs. With any durability, a model that serves a checkpoint gets lost
// rows from there again.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/steady_time.h"
#include "base/thread_pools.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/coordinator/checkpoints.h"
#include "server/coordinator/model_registry.h"
#include "server/ops/logging.h"

namespace emberd::coordinator {

// Thread-safe. With durability MEMORY it does nothing else by itself. Several coordinators may do
// the same at once: shards let one of them.
class AutoCheckpoints {
 public:
  // What the arguments point to must outlive it.
  AutoCheckpoints(Checkpoints* checkpoints, ModelRegistry* registry, BlockingPool* threads)
      : checkpoints_(checkpoints), registry_(registry), tasks_(threads, 4, 256) {}
  // Gives up what is under way.
  ~AutoCheckpoints();

  // The rows with which a declaration begins that finds no model; nothing: initial ones. NOT_FOUND:
  // there is no such checkpoint. FAILED_PRECONDITION: the newest is of another config. DATA_LOSS:
  // all checkpoints of the name are damaged, so that rows may be lost.
  absl::StatusOr<std::optional<RowSource>> FindRows(const v1::ModelConfig& config,
                                                    const std::string& restore_from) const;
  // The model is dropped or reset: no checkpoint that it has is to bring rows back. An error: one
  // may. `history`: see CheckpointStore::GiveUp.
  absl::Status GiveUpRows(const std::string& model, uint64_t history);

  // What callers hear of a lost model: UNAVAILABLE, with the progress, while its rows come back;
  // `lost` if there is nothing to bring back.
  absl::Status ExplainLost(const std::string& model, const absl::Status& lost);
  // In words; empty: nothing comes back.
  std::string RecoveryOf(const std::string& model) const;

  // Saves what is due, and brings back what is lost. Call it every second.
  void Watch();

  // With durability CHECKPOINT: saves what has changed since the newest checkpoints, for the
  // process is about to end. Until `end` at most; the log says what was saved, and what was not.
  // UNAVAILABLE names the models that were not.
  bool saves_at_stop() const { return recovers(); }
  absl::Status SaveAtStop(absl::Time end);

 private:
  // Why a model is to be saved.
  enum class Reason { kDue, kStop };
  struct Recovery {
    std::string checkpoint;
    std::vector<v1::GroupStep> groups;
    absl::Time began = SteadyNow();
    int64_t bytes = 0;
    int64_t total_bytes = 0;
  };
  struct Failure {
    std::string reason;
    absl::Time again = absl::InfinitePast();  // no other attempt begins before
  };
  // What is known of the newest checkpoint of a model.
  struct Saved {
    absl::Time at = absl::InfinitePast();
    int64_t changes = 0;
    uint64_t history = 0;  // of its rows
    absl::Time tried = absl::InfinitePast();
    bool saving = false;
  };

  bool recovers() const {
    return checkpoints_->storage().durability() == v1::StorageConfig::CHECKPOINT;
  }
  bool has_log() const { return checkpoints_->has_log(); }
  bool saves() const { return recovers() || has_log(); }
  // The model if it serves a checkpoint, else null.
  step::ServedModelPtr ReadOnly(const std::string& model) const;
  // Whether what it serves is still there, or cannot be read just now.
  bool MayServeAgain(const step::ServedModel& model) const;
  absl::Status ServeAgain(const step::ServedModel& model);
  // For rows that come back by themselves, which a drop or a reset may have given up by the time
  // that shards serve them, here or at another coordinator.
  absl::StatusOr<RowSource> FindRowsUnlessGivenUp(const std::string& model,
                                                  const std::string& name) const;
  // Whether some checkpoint may bring the model back.
  absl::StatusOr<bool> MayRecover(const std::string& model) const;
  void StartRecovery(const std::string& model) ABSL_LOCKS_EXCLUDED(mutex_);
  // The newest checkpoint first, and older ones if it is damaged.
  absl::Status Recover(const std::string& model);
  absl::Status RecoverFrom(const v1::CheckpointInfo& checkpoint);
  // Models of which there are checkpoints, but no rows.
  void RecoverAbsent();
  bool Due(const Saved& saved, const step::ServedModel& model, Reason reason) const;
  // Whether the error of a save says that the model's rows are gone: a file may be what was not
  // found, too, as where the folder of a shard is not that of the coordinator.
  bool IsGone(const step::ServedModel& model, const absl::Status& status) const {
    return absl::IsNotFound(status) && registry_->Recall(model.id).history() != model.history;
  }
  void SaveIfDue(const step::ServedModelPtr& model) ABSL_LOCKS_EXCLUDED(mutex_);
  // Unless another coordinator has just done so.
  absl::Status Save(const step::ServedModelPtr& model, Reason reason, rpc::CallContext* context)
      ABSL_LOCKS_EXCLUDED(mutex_);

  Checkpoints* const checkpoints_;
  ModelRegistry* const registry_;
  rpc::CallContext stopping_{absl::InfiniteFuture()};
  mutable absl::Mutex mutex_;
  std::map<std::string, Recovery> recoveries_ ABSL_GUARDED_BY(mutex_);  // under way
  std::map<std::string, Failure> failures_ ABSL_GUARDED_BY(mutex_);     // of the last attempts
  std::map<std::string, Saved> saved_ ABSL_GUARDED_BY(mutex_);
  ops::RateLimitedLog unreadable_{absl::Minutes(1)};
  int watches_ = 0;
  TaskQueue tasks_;  // last: its destructor waits for what uses the rest
};

}  // namespace emberd::coordinator
