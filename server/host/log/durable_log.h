// The log of a shard from the start of its process on: reads what an earlier process wrote, then
// goes on from there. What storage.durability LOG means to a shard.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/blocking_pool.h"
#include "base/buffer_pool.h"
#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "emberd/internal/v1/log.pb.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/cluster.pb.h"
#include "server/checkpoint/partition_file.h"
#include "server/host/group_steps.h"
#include "server/host/hosted_models.h"
#include "server/host/mutation_votes.h"
#include "server/host/row_files.h"
#include "server/log/log_reader.h"
#include "shard/engine.h"

namespace emberd::host {

// Brings a shard back to what it knew when its process ended: the rows of the newest checkpoint of
// each model, and then its log, record by record, through the calls that wrote it.
//
// A checkpoint's rows are those at the beginning of some segment. What the log has before that
// segment is read all the same, for votes and groups of all models follow from it, but changes no
// row of this model again.
//
// Models that the log removes later get rows of no account, and their checkpoints need not be there
// any more. Only where others share its rows does such a model get all its changes again.
class ShardRecovery {
 public:
  // What it works with; must outlive it. Nobody else uses it meanwhile.
  struct Parts {
    shard::Engine* engine = nullptr;
    HostedModels* models = nullptr;
    MutationVotes* votes = nullptr;
    GroupSteps* groups = nullptr;
    ShardLog* log = nullptr;  // not started
    BlockingPool* threads = nullptr;
    // An update, and an assignment, as what is voted on.
    std::function<MutationVotes::Change(uint64_t model_id,
                                        std::shared_ptr<const shard::CheckedPart> part)>
        update;
    std::function<absl::StatusOr<MutationVotes::Change>(const AssignCommand& command)> assignment;
  };
  // Does work again and again while it is RESOURCE_EXHAUSTED.
  using AwaitRoom = std::function<absl::Status(absl::FunctionRef<absl::Status()> work)>;
  ShardRecovery(const ShardPlace& place, std::string log_folder, std::string checkpoints,
                const Parts& parts, AwaitRoom await_room)
      : place_(place),
        log_folder_(std::move(log_folder)),
        checkpoints_(std::move(checkpoints)),
        parts_(parts),
        await_room_(std::move(await_room)) {}

  // Where the log is to go on. FAILED_PRECONDITION: it is that of another shard. DATA_LOSS: the log
  // or a checkpoint is damaged or missing. Nothing is served after an error.
  absl::StatusOr<log::LogEnd> Run();
  // Makes Run end soon, with CANCELLED; from any thread.
  void Cancel() { progress_.cancelled = true; }

  // While it runs; from any thread.
  const ShardProgress& progress() const { return progress_; }
  // After it: how long it read checkpoints.
  absl::Duration loading() const { return loading_; }

 private:
  using Record = internal::v1::LogRecord;
  using MutationKey = std::pair<std::string, uint64_t>;

  // Finds the newest rows of each model, before any is read.
  void Survey(const Record& record, const log::LogPosition& position);
  absl::Status Replay(const Record& record, const log::LogPosition& position);
  absl::Status ReplayState(const internal::v1::LogState& state);
  absl::Status ReplayModel(const internal::v1::LogModelMade& made);
  absl::Status ReplayVote(const internal::v1::LogVote& vote);
  void ReplayDecision(const internal::v1::LogDecision& decision);
  void ReplayMade(const internal::v1::LogMade& made);
  absl::Status ReplayPart(const internal::v1::LogPart& part);
  void ReplayStep(const internal::v1::DecideStepRequest& request);
  // Waits where models can make no room for this one, as while the disk of evicted rows is full.
  // Without eviction nothing makes room, and the error stands.
  absl::Status WithRoom(absl::FunctionRef<absl::Status()> work);
  // Gives the model the rows from which the log's changes follow.
  absl::Status AddModel(internal::v1::LogModel model);
  absl::StatusOr<checkpoint::CheckpointChain> FindChain(const internal::v1::LogRows& rows) const;
  // Nothing for a change of a model that is gone.
  absl::StatusOr<std::optional<MutationVotes::Change>> ChangeOf(const internal::v1::LogVote& vote);
  // Null: its model is gone.
  absl::StatusOr<std::shared_ptr<const shard::CheckedPart>> PartOf(
      uint64_t model_id, const internal::v1::LogBlob& blob);
  absl::StatusOr<absl::Span<const char>> Read(const internal::v1::LogBlob& blob,
                                              std::shared_ptr<const void>* owner);
  // Whether nobody will ever see the rows that the model gets here.
  bool RowsAreGone(const internal::v1::LogModel& model) const;
  // Whether the rows of the model have the changes of this segment already, or are of no account.
  bool Skips(uint64_t model_id) const;
  void ChangeBegins(uint64_t model_id) ABSL_LOCKS_EXCLUDED(mutex_);
  void ChangeEnds() ABSL_LOCKS_EXCLUDED(mutex_);
  void WaitForChanges(int at_most) ABSL_LOCKS_EXCLUDED(mutex_);

  const ShardPlace place_;
  const std::string log_folder_;
  const std::string checkpoints_;
  const Parts parts_;
  const AwaitRoom await_room_;
  ShardProgress progress_;
  absl::Duration loading_;
  BufferPool pool_;
  uint64_t segment_ = 0;  // of the record at hand
  bool state_is_here_ = false;
  // By model and history, from what its rows are made; by model, the segment from which its changes
  // are made again.
  std::map<std::pair<uint64_t, uint64_t>, internal::v1::LogRows> rows_;
  std::map<uint64_t, uint64_t> begins_;
  // By model, the history that it was made with; model and history of those that are removed later.
  std::map<uint64_t, uint64_t> made_with_;
  std::set<std::pair<uint64_t, uint64_t>> removed_;
  // Changes that are in the rows and wait for the record that says what they did.
  std::map<MutationKey, MutationVotes::RowsCallback> made_before_;
  std::set<std::pair<uint64_t, std::string>> steps_made_before_;
  std::optional<internal::v1::LogDecision> late_decision_;  // of a mistake (base/failpoint.h)
  Mutex mutex_;
  CondVar ended_;
  int changing_ ABSL_GUARDED_BY(mutex_) = 0;  // changes on their way to the rows
};

// Thread-safe.
class DurableLog {
 public:
  // Begins to read at once, on a thread of its own, and then starts `parts.log`. With another
  // durability it does nothing. `describe` gives all that the shard knows, for a segment.
  using Describe = std::function<void(uint64_t segment, internal::v1::LogState* state)>;
  DurableLog(const v1::StorageConfig& storage, const ShardPlace& place,
             const ShardRecovery::Parts& parts, Describe describe);
  // Waits for its thread.
  ~DurableLog();

  bool on() const { return recovery_ != nullptr; }
  // OK when all is read; changes are refused then as long as the disk is full. UNAVAILABLE, with
  // the progress, before; FAILED_PRECONDITION with the reason if that failed.
  absl::Status CheckReady() const;
  void Wait();
  // Makes the reading end soon.
  void Cancel();
  v1::LogStatus Status() const;

 private:
  absl::Status Recover();
  // Does `work` again and again while it is RESOURCE_EXHAUSTED, as on a full disk, and tells
  // callers why they wait.
  absl::Status AwaitRoom(absl::FunctionRef<absl::Status()> work) ABSL_LOCKS_EXCLUDED(mutex_);
  // Begins the log's next segment; waits for room on a full disk, while the shard serves lookups.
  absl::StatusOr<std::unique_ptr<log::LogWriter>> OpenWriter(const log::LogEnd& end);
  // Nobody else writes to the folder from now on.
  absl::Status LockFolder();

  const v1::StorageConfig storage_;
  const ShardPlace place_;
  const std::string folder_;  // the shard's own
  const Describe describe_;
  ShardLog* const log_;
  const absl::Time start_;
  FileDescriptor lock_;
  std::unique_ptr<ShardRecovery> recovery_;  // what it brought back refers to it
  mutable Mutex mutex_;
  CondVar ended_;
  bool over_ ABSL_GUARDED_BY(mutex_) = true;
  std::string waits_for_ ABSL_GUARDED_BY(mutex_);  // before it is over; empty: nothing
  absl::Status result_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace emberd::host
