// The log of a shard from the start of its process on: reads what an earlier process wrote, then
// goes on from there. What storage.durability LOG means to a shard.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/file_descriptor.h"
#include "base/thread_pools.h"
#include "emberd/internal/v1/log.pb.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/cluster.pb.h"
#include "server/host/group_steps.h"
#include "server/host/hosted_models.h"
#include "server/host/mutation_votes.h"
#include "server/log/log_reader.h"
#include "shard/engine.h"

namespace emberd::host {

// What a recovery works with; must outlive it. Nobody else uses it meanwhile.
struct RecoveryParts {
  shard::Engine* engine = nullptr;
  HostedModels* models = nullptr;
  MutationVotes* votes = nullptr;
  GroupSteps* groups = nullptr;
  ShardLog* log = nullptr;  // not started
  Sequencer* order = nullptr;
  BlockingPool* threads = nullptr;
  // An update, and an assignment, as what is voted on.
  std::function<MutationVotes::Change(uint64_t model_id,
                                      std::shared_ptr<const shard::CheckedPart> part)>
      update;
  std::function<absl::StatusOr<MutationVotes::Change>(const AssignCommand& command)> assignment;
};

class ShardRecovery;

// Thread-safe.
class DurableLog {
 public:
  // Begins to read at once, on a thread of its own, and then starts `parts.log`. With another
  // durability it does nothing. `describe` gives all that the shard knows, for a segment.
  using Describe = std::function<void(uint64_t segment, internal::v1::LogState* state)>;
  DurableLog(const v1::StorageConfig& storage, const ShardPlace& place, const RecoveryParts& parts,
             Describe describe);
  // Waits for its thread.
  ~DurableLog();

  bool on() const { return recovery_ != nullptr; }
  // OK when all is read; changes are refused then as long as the disk is full. UNAVAILABLE, with
  // the progress, before; FAILED_PRECONDITION with the reason if that failed.
  absl::Status CheckReady() const;
  // Waits for at most `limit` until all is read, or that failed, and says whether it is over.
  bool Wait(absl::Duration limit);
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
  mutable absl::Mutex mutex_;
  bool over_ ABSL_GUARDED_BY(mutex_) = true;
  std::string waits_for_ ABSL_GUARDED_BY(mutex_);  // before it is over; empty: nothing
  absl::Status result_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace emberd::host
