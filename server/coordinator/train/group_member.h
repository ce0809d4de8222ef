// One trainer's place in its group: joining, what the ranks of a group tell each other in a step,
// and leaving.
// See docs/groups.md.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/train.pb.h"
#include "server/coordinator/resources.h"
#include "server/rpc/call_context.h"
#include "server/step/served_model.h"
#include "server/step/shard_set.h"

namespace emberd::coordinator {

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

// See AdminService.DropGroup. A step that was left half done is finished, or given up, first.
absl::StatusOr<v1::DropGroupResponse> DropGroup(const step::ServedModel& model,
                                                const std::string& group,
                                                const step::ShardSet& shards,
                                                rpc::CallContext* context);

// INVALID_ARGUMENT names the field; unset fields get their defaults.
absl::Status CompleteTrainStart(v1::TrainStart* start);

// Where the ranks of a SYNC group waited for each other. Adds up over the exchanges of a request.
struct RankWait {
  absl::Duration waited;
  // The last to come to the exchange where that made most of a difference; -1: there was none.
  int slowest_rank = -1;
  absl::Duration slowest_by;  // how long after the first
};

// Methods may be called from several threads. Errors end the member's generation for all ranks when
// it leaves, so the caller leaves after any.
class GroupMember {
 public:
  // Joins, waits for the other ranks (SYNC), and finds out on the shards where the group is: a step
  // that some shard applied while others only hold its parts is finished there first.
  // FAILED_PRECONDITION: shards disagree and cannot be brought together. `resources` must outlive
  // it.
  static absl::StatusOr<std::unique_ptr<GroupMember>> Join(const CoordinatorResources& resources,
                                                           step::ServedModelPtr model,
                                                           const v1::TrainStart& start,
                                                           rpc::CallContext* context);
  ~GroupMember();

  const v1::GroupOptions& options() const { return start_.options(); }
  int64_t next_step() const { return next_step_; }
  uint64_t generation() const { return opened_.generation; }
  uint64_t made_generation() const { return opened_.made_generation; }
  absl::Duration step_timeout() const {
    return absl::Milliseconds(start_.options().step_timeout_ms());
  }
  const std::string& group() const { return start_.group(); }
  int rank() const { return start_.rank(); }
  // Names this rank's part of a step to the shards.
  host::GroupPart Part(int64_t step) const;

  // Whether any rank needs cuts in step `step`; `mine`: this one does.
  absl::StatusOr<bool> AnyNeedsCuts(int64_t step, bool mine, rpc::CallContext* context,
                                    RankWait* wait);
  // If any does: the cuts that all ranks make, each having said which ones it needs.
  absl::StatusOr<uint64_t> CutsOfAll(int64_t step, uint64_t mine, rpc::CallContext* context,
                                     RankWait* wait);
  // Returns when every rank has called it. A rank calls it when all shards hold its part; so all
  // hold the parts of all ranks then.
  absl::Status AllStaged(int64_t step, rpc::CallContext* context, RankWait* wait);
  // BOUNDED: waits until no other rank is too far behind for step `step` to begin. Ranks that wait
  // for no others: asks whether they are still known where the ranks meet, because they hear of
  // that nowhere else.
  absl::Status WaitForProgress(int64_t step, rpc::CallContext* context, RankWait* wait);
  // BOUNDED: every step before `next_step` is done.
  absl::Status TellProgress(int64_t next_step, rpc::CallContext* context);

  // `finished`: the trainer ended its stream in order. Only the first call counts, and a later one
  // with `finished`.
  void Leave(const std::string& reason, bool finished);

 private:
  GroupMember(const CoordinatorResources& resources, step::ServedModelPtr model,
              const v1::TrainStart& start, uint64_t membership);

  bool sync() const { return start_.options().consistency() == v1::SYNC; }
  bool bounded() const { return start_.options().consistency() == v1::BOUNDED; }
  // A request to the host of the group, with what all requests of a member have.
  template <typename Request>
  Request AsMember() const;
  absl::Status FindStep(rpc::CallContext* context);
  internal::v1::OpenGroupRequest OpenRequest() const;  // but for who opens which generation
  absl::Status OpenOnShards(rpc::CallContext* context);
  absl::StatusOr<std::vector<std::string>> Exchange(int group_key, int64_t step, std::string value,
                                                    rpc::CallContext* context, RankWait* wait);

  const CoordinatorResources& resources_;
  const step::ServedModelPtr model_;
  const v1::TrainStart start_;
  const uint64_t membership_;  // the generation at the host of the group, which counts its own
  // ASYNC and BOUNDED ranks are groups of their own to the shards.
  const std::string shard_group_;
  // On the shards. SYNC: rank 0 has opened it, and has told the others what they know of it.
  OpenedGroup opened_;
  int64_t next_step_ = 0;

  absl::Mutex mutex_;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace emberd::coordinator
