// The steps of one training stream, without its transport: what each lookup may see, when each
// update may be made, and what the stream exchanges with the other ranks of its group, which it
// joins and leaves. See docs/groups.md.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/v1/embedding_service.pb.h"
#include "emberd/v1/train.pb.h"
#include "server/coordinator/model_registry.h"
#include "server/coordinator/resources.h"
#include "server/ops/metrics.h"
#include "server/rpc/call_context.h"
#include "server/step/request_reader.h"
#include "server/step/served_model.h"
#include "server/step/shard_set.h"
#include "server/step/step.h"

namespace emberd::coordinator {

class GroupMember;
struct RankWait;
class StreamCheckpoints;

// A generation of a group that was begun on the shards, by its ranks or by DropGroup.
struct OpenedGroup {
  uint64_t generation = 0;  // nobody else's: see group_steps.h
  uint64_t opener = 0;
  int64_t next_step = -1;        // all before it have been made on all shards; -1: none has been
  uint64_t made_generation = 0;  // of the newest of them; 0: not known
  std::vector<internal::v1::RankProgress>
      ranks;            // those that some shard knows, if the request asks for them
  absl::Status agreed;  // FAILED_PRECONDITION: shards cannot be brought together
};

// `request` has everything but generation and opener. A step that some shard has applied while
// others only hold its parts is finished first. ABORTED: others begin the group at the same time,
// again and again.
absl::StatusOr<OpenedGroup> OpenGroup(const step::ShardSet& shards,
                                      internal::v1::OpenGroupRequest request,
                                      rpc::CallContext* context);

struct TrainLookupOutput {
  step::LookupOutput lookup;
  v1::StepTimes times;
};

// Three threads may use it at once, one each: the reader of the stream (Admit..., EndRequests), one
// for lookups, one for updates. The first failure ends the session: every call from then on, and
// every call that waits, returns it, and the group hears of it.
class TrainSession {
 public:
  // Lookups that are admitted before the update of an earlier step is. More would only pile up.
  static constexpr int64_t kMaxLookupsAhead = 8;

  // `resources` and `context` must outlive the session; `context` carries the stream's
  // cancellation.
  static absl::StatusOr<std::unique_ptr<TrainSession>> Start(const CoordinatorResources& resources,
                                                             v1::TrainStart start,
                                                             rpc::CallContext* context);
  // Gives back the batches of steps that were not finished, and leaves the group.
  ~TrainSession();

  v1::TrainStarted started() const;
  bool pipelined() const;

  // Checks the order of requests: each step has one lookup and then one update, steps follow one
  // another. INVALID_ARGUMENT says which step was expected.
  absl::Status AdmitLookup(int64_t step);
  absl::Status AdmitUpdate(int64_t step);
  // The trainer sends no more: updates do not wait for lookups that will not come.
  void EndRequests();

  // Admitted steps, in order.
  absl::StatusOr<TrainLookupOutput> Lookup(const step::TrainStepRequest& request);
  absl::StatusOr<v1::TrainUpdateResult> Update(const step::TrainStepRequest& request);

  // Whether a request has failed, or the trainer is gone.
  bool failed() { return !Failure().ok(); }
  // To be called when no request is under way, and no more will come, and before the trainer hears
  // of that: then it may begin another group of the same name at once.
  void Leave();
  // To be called when the trainer has heard of the end.
  void Finish();
  void Fail(const absl::Status& status);

 private:
  class Hooks;
  struct Step {
    uint64_t handle = 0;
    absl::Duration lookup_time;  // from its arrival to the answer
  };
  TrainSession(const CoordinatorResources& resources, step::ServedModelPtr model,
               std::unique_ptr<GroupMember> member, rpc::CallContext* context);

  absl::StatusOr<TrainLookupOutput> TryLookup(const step::TrainStepRequest& request);
  absl::StatusOr<v1::TrainUpdateResult> TryUpdate(const step::TrainStepRequest& request);
  // Waits until the lookup of a step may read rows.
  absl::Status AwaitUpdates(int64_t step, v1::StepTimes* times);
  // Waits until the update of a step may be made.
  absl::Status AwaitLookups(int64_t step, v1::StepTimes* times);
  // Why a step failed; see ModelRegistry.
  absl::Status Explain(const absl::Status& status) const {
    return resources_.registry->Explain(model_->id, model_->history, status);
  }
  absl::Status Failure();
  // Also tells the group, of `what` ("lookup of step 3").
  void FailStep(const std::string& what, const absl::Status& status);
  // Waits until `ready`, a condition on what the mutex guards, or the session fails.
  absl::Status Await(const std::function<bool()>& ready, const std::string& what,
                     v1::StepTimes* times);
  void Record(const RankWait& wait, v1::StepTimes* times);
  // The lookup of a step has read its rows, which are kept under `handle`.
  void Gathered(int64_t step, uint64_t handle);
  void LogIfSlow(int64_t step, absl::Duration time, const v1::StepTimes& times);

  const CoordinatorResources& resources_;
  const step::ServedModelPtr model_;
  const std::unique_ptr<GroupMember> member_;
  rpc::CallContext* const context_;
  ops::GroupMetrics* const metrics_;
  const std::unique_ptr<StreamCheckpoints> checkpoints_;  // of the thread for updates

  absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  // The next step to be admitted, gathered and applied.
  int64_t next_lookup_ ABSL_GUARDED_BY(mutex_);
  int64_t next_update_ ABSL_GUARDED_BY(mutex_);
  int64_t next_gather_ ABSL_GUARDED_BY(mutex_);
  int64_t next_apply_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, Step> steps_ ABSL_GUARDED_BY(mutex_);  // gathered, not applied

  rpc::CancelWatch watch_;  // last: it may call Fail
};

}  // namespace emberd::coordinator
