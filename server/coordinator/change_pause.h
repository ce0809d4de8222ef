// Holds back the changes of a model on all shards, so that a checkpoint's moment is the same on all
// of them: every update is wholly before it or wholly after it.
//
//   changes       ... voted on | held back at the gates of all shards ............. | go on
//   this class        Settle: pauses, and asks until no decided change is on its way
//   its caller                                                           BeginSave
//
// A change that not all shards hold cannot be decided while the gates are closed: it stays
// undecided and comes after the moment. One that all hold may be decided at any time, so it is
// waited for.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/rpc/call_context.h"
#include "server/step/served_model.h"
#include "server/step/shard_set.h"

namespace emberd::coordinator {

// One pause, by one thread at a time. Its destructor lets changes go on.
class ChangePause {
 public:
  using Answers = std::vector<internal::v1::PauseChangesResponse>;  // by shard

  // What it is given must outlive it.
  ChangePause(const step::ShardSet& shards, step::Mutations* mutations, step::ServedModelPtr model);
  ~ChangePause() { Resume(); }
  ChangePause(const ChangePause&) = delete;
  ChangePause& operator=(const ChangePause&) = delete;

  uint64_t id() const { return id_; }

  // Until Settle, only steps of the group beyond `after_step` are held back.
  absl::Status HoldGroup(const std::string& group, int64_t after_step, rpc::CallContext* context);
  // From now on holds back all changes. Returns when none is on its way on any shard; that stays so
  // until Resume, or until `kLease` is over. UNAVAILABLE: it took too long. ABORTED: somebody else
  // has paused the model.
  absl::StatusOr<Answers> Settle(rpc::CallContext* context);
  void Resume();

  static constexpr absl::Duration kLease = absl::Seconds(20);

 private:
  absl::StatusOr<Answers> Ask(const std::string& group, int64_t after_step,
                              rpc::CallContext* context);
  // What is on its way, in words; empty: nothing.
  absl::StatusOr<std::string> FindMoving(const Answers& answers, bool decide,
                                         rpc::CallContext* context);
  absl::StatusOr<std::string> FindMovingMutation(const Answers& answers, bool decide,
                                                 rpc::CallContext* context);
  absl::StatusOr<std::string> FindMovingStep(const Answers& answers, bool decide,
                                             rpc::CallContext* context);
  // On the shards that hold the whole of it; `held` has what each holds of the group. `is_made`: on
  // some shard.
  void CommitStep(int64_t step, bool is_made,
                  const std::vector<std::pair<int, internal::v1::HeldStep>>& held,
                  rpc::CallContext* context);

  const step::ShardSet& shards_;
  step::Mutations* const mutations_;
  const step::ServedModelPtr model_;
  const uint64_t id_;
  bool paused_ = false;
};

}  // namespace emberd::coordinator
