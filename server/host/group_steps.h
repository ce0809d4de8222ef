// The steps of groups on one shard: the parts of a step wait here for each other and make one
// update together. See docs/change.md.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "emberd/internal/v1/log.pb.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/internal/v1/shard_state.pb.h"
#include "server/host/log/shard_log.h"
#include "server/host/shard_backend.h"
#include "shard/engine.h"

namespace emberd::host {

// Which generation of a group a shard is in, and how shards and coordinators agree on the next.
//
// Whenever the ranks of a group begin anew, they do so under a generation: a number that no others
// of the group have had or will have. So what comes late from an earlier one (parts, words,
// openings) is known and refused. This needs no clock and no place that must live:
//
//   1. Who begins asks every shard for the newest generation that it knows (OpenGroup with
//      generation 0), and takes the number after the largest.
//   2. Under a random name of its own, the opener, it opens that number on every shard.
//   3. A shard takes a number that is larger than its own, and its own again from the same opener,
//      for an answer may be lost. It says ABORTED to all else, and whoever hears that has lost:
//      it begins again at 1, or gives up.
//
// A number is used only once all shards have taken it, and a shard takes a number from one opener,
// so two cannot use the same. From then on every shard knows it, so whoever begins later asks for
// more. A shard that has missed openings makes no difference: the largest answer counts, and its
// own number only grows. A shard may forget a group, but not how far the numbers of forgotten ones
// went (GroupSteps), nor does a checkpoint. A shard that has lost its memory has lost its rows: all
// calls name the history of the rows, and those of before are refused.
//
// Not thread-safe.
class GroupGeneration {
 public:
  GroupGeneration() = default;
  // Of a group that is new here, or comes from a checkpoint: numbers up to `newest` may have been
  // used, and nobody can open them any more.
  explicit GroupGeneration(uint64_t newest) : number_(newest) {}
  // As it was before a restart.
  GroupGeneration(uint64_t number, uint64_t opener) : number_(number), opener_(opener) {}

  uint64_t number() const { return number_; }  // 0: there was none
  uint64_t opener() const { return opener_; }
  // The number that has been opened here, and by this opener, which is not 0.
  bool Is(uint64_t number, uint64_t opener) const;
  // What the shard says to those who ask.
  uint64_t Newest() const;
  // Neither is 0. ABORTED as above.
  absl::Status Open(uint64_t number, uint64_t opener);

 private:
  uint64_t number_ = 0;
  uint64_t opener_ = 0;  // 0: nobody can open it again
};

// Thread-safe. A group passes through generations (group_steps.h), and in each through steps,
// one at a time: parts come in any order (Hold), and the first decision to commit, which is made
// only when all parts are held on all shards, makes the update.
class GroupSteps {
 public:
  struct Options {
    int64_t max_held_bytes = 0;  // gradients of parts that wait
    absl::Duration part_ttl;     // parts wait for others at least so long
    int max_groups = 65536;
    // A group may be forgotten after this long without a call, where room is needed: then nobody is
    // in it any more. Twice its step_timeout, if that is more.
    absl::Duration idle = absl::Hours(24);
  };
  struct Hooks {
    // Gives up the batch of a part that made its update, or never will.
    std::function<void(uint64_t batch_handle)> release_batch;
    std::function<void(uint64_t model_id, const shard::ApplyResult& result)> step_applied;
  };
  using RowsCallback = std::function<void(absl::StatusOr<RowCounts>)>;

  // `engine`, `order` and `log` must outlive this; hooks run on any thread, never under the lock.
  GroupSteps(Options options, shard::Engine* engine, Sequencer* order, ShardLog* log, Hooks hooks);

  // See shard_service.proto.
  absl::StatusOr<internal::v1::OpenGroupResponse> Open(
      const internal::v1::OpenGroupRequest& request);

  // Takes one rank's part, made of `command`. ABORTED: the generation is over or was never opened,
  // or the step has been made.
  // FAILED_PRECONDITION: another step is next. RESOURCE_EXHAUSTED names the bytes.
  // ALREADY_EXISTS: the rank's part is here. NOT_FOUND: the model was dropped. INVALID_ARGUMENT:
  // the part does not agree with the others; with the last one, the update cannot fail unless its
  // model is dropped before. `blob`: what the log has of it.
  absl::Status Hold(const ApplyCommand& command, std::shared_ptr<const shard::CheckedPart> checked,
                    const internal::v1::LogBlob& blob = {});

  // Decides to make the step of this part. `done` gets the rows of the whole step; it runs at once
  // or on a thread of the engine.
  void Commit(uint64_t model_id, const GroupPart& part, RowsCallback done);

  void Decide(const internal::v1::DecideStepRequest& request, RowsCallback done);

  // Ends generations in which parts have waited for others in vain: for longer than part_ttl and
  // twice the group's step_timeout. A step whose parts are all here waits for ever.
  void Sweep(absl::Time now);
  // Under the lock of `order`: drops all groups of a model that is gone. What is returned runs when
  // the lock is free.
  [[nodiscard]] std::function<void()> DropModel(uint64_t model_id);

  // Forgets groups. Numbers of generations go on where theirs ended. FAILED_PRECONDITION, and
  // nothing is forgotten: a step is on its way, or all its parts are here and another shard may
  // have made it. Parts of a step that is not whole go, too.
  absl::StatusOr<internal::v1::DropGroupsResponse> DropGroups(
      const internal::v1::DropGroupsRequest& request);

  // The groups of a model as they are now.
  using HeldList = google::protobuf::RepeatedPtrField<internal::v1::HeldStep>;
  void ListHeld(uint64_t model_id, HeldList* held) const;
  // The newest generation of groups that have been forgotten, of whatever model.
  uint64_t forgotten_generation() const;
  // For checkpoints: the groups that have made steps.
  void Save(uint64_t model_id, internal::v1::ShardState* state) const;
  // Puts them in the place of what is known. `finished`: groups that had finished before; they stay
  // so until a trainer of theirs comes back. Lock, and what is returned: as of DropModel.
  [[nodiscard]] std::function<void()> Restore(uint64_t model_id,
                                              const internal::v1::ShardState& state,
                                              const std::set<std::string>& finished);
  std::set<std::string> Finished(uint64_t model_id) const;

  // For the log, under the lock of `order`: all that is known here.
  void Describe(internal::v1::LogState* state) const;
  // Takes what a log has, before anything is known here. `part_of` reads a part.
  using PartOf = std::function<absl::StatusOr<std::shared_ptr<const shard::CheckedPart>>(
      const internal::v1::LogPart& part)>;
  absl::Status Remember(const internal::v1::LogState& state, const PartOf& part_of);
  // While the log is read (null: it has been): steps of models for which `skips` says true are in
  // the rows already, and end with FinishStep; what was taken before is taken again, whatever the
  // budgets are now.
  using Skips = std::function<bool(uint64_t model_id)>;
  void SetReplaying(Skips skips);
  void FinishStep(uint64_t model_id, const std::string& group,
                  const absl::StatusOr<RowCounts>& rows) ABSL_LOCKS_EXCLUDED(order_->mutex) {
    Finish({model_id, group}, /*waiting=*/nullptr, rows);
  }
  // The log says that the generation has ended; `forget`: and that the group was forgotten.
  void EndGeneration(uint64_t model_id, const std::string& group, bool forget);

 private:
  // Those who wait for the rows of one step that is on its way.
  using Waiting = std::shared_ptr<std::vector<RowsCallback>>;
  struct Step {
    int64_t number = -1;  // -1: there is none
    uint64_t generation = 0;
    shard::StagedUpdate update;
    std::vector<uint64_t> batch_handles;        // by rank
    std::vector<internal::v1::LogPart> logged;  // by rank
    absl::Time touched;
  };
  struct Group {
    GroupGeneration generation;
    // Here: size, ended, finished, step_timeout_ms, known, next_step, made_generation, applying.
    // Its other fields are filled from the members below when it is written.
    internal::v1::LogGroup kept;
    Step waiting;                                       // the step whose parts come
    absl::StatusOr<RowCounts> last_rows = RowCounts();  // of step next_step - 1
    Waiting waiting_rows = std::make_shared<std::vector<RowsCallback>>();  // for last_rows
    absl::Time touched;

    bool busy() const { return kept.applying() || waiting.number >= 0; }
    absl::Duration step_timeout() const { return absl::Milliseconds(kept.step_timeout_ms()); }
  };
  using Key = std::pair<uint64_t, std::string>;
  using Groups = absl::flat_hash_map<Key, Group>;

  // What a group's opener, or who asks, is told. Null: the group is not known here.
  internal::v1::OpenGroupResponse Describe(const internal::v1::OpenGroupRequest& request,
                                           const Group* group) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);
  absl::Status OpenGroup(const internal::v1::OpenGroupRequest& request, Group* group,
                         std::vector<uint64_t>* released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);

  // ABORTED if the group is in a later generation, or this one has ended.
  absl::Status CheckNotOver(const Group& group, const std::string& name, uint64_t generation) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);

  absl::Status CheckIsNext(const Group& group, const GroupPart& part) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);
  // Opens the group's step if this is its first part, and puts the part in its place.
  absl::Status Place(Group* group, const ApplyCommand& command,
                     std::shared_ptr<const shard::CheckedPart> checked,
                     const internal::v1::LogBlob& blob, std::vector<uint64_t>* released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);
  // Whether `step` was the last to be made. If it is still on its way, takes `done`, for its end.
  bool AnswerApplied(Group* group, int64_t step, RowsCallback* done)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);
  // Takes the group to the next step; its parts are the caller's to apply, before the lock is gone.
  Step TakeStep(Group* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);
  void Apply(const Key& key, Step step, const Waiting& waiting)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);
  void Applied(const Key& key, const Waiting& waiting, const std::vector<uint64_t>& handles,
               const absl::StatusOr<shard::ApplyResult>& result) ABSL_LOCKS_EXCLUDED(order_->mutex);
  // A step has ended. `waiting`: those who wait for it; null: it is the one on its way now. Changes
  // the group only if the step is of this run of the group.
  void Finish(const Key& key, Waiting waiting, const absl::StatusOr<RowCounts>& rows)
      ABSL_LOCKS_EXCLUDED(order_->mutex);
  // Why the group cannot be forgotten now.
  absl::Status CheckMayGo(const Group& group, const std::string& name) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);
  // Makes room for another group.
  absl::Status MakeRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);
  // To be called before a group goes.
  void NoteForgotten(const Group& group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex) {
    forgotten_generation_ = std::max(forgotten_generation_, group.generation.number());
  }
  // Empties the waiting step; its batches go to `released`.
  void Drop(Group* group, std::vector<uint64_t>* released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(order_->mutex);
  void Release(const std::vector<uint64_t>& handles) ABSL_LOCKS_EXCLUDED(order_->mutex);

  const Options options_;
  shard::Engine* const engine_;
  const Hooks hooks_;
  ShardLog* const log_;

  Sequencer* const order_;  // its lock is that of all that follows
  Skips skips_ ABSL_GUARDED_BY(order_->mutex);
  Groups groups_ ABSL_GUARDED_BY(order_->mutex);
  // The newest of groups that are not here any more, of whatever model.
  uint64_t forgotten_generation_ ABSL_GUARDED_BY(order_->mutex) = 0;
  int64_t held_bytes_ ABSL_GUARDED_BY(order_->mutex) = 0;
};

}  // namespace emberd::host
