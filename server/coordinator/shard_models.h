// The models on the shards: what the shards say about them, what that means for one of them, and
// how models are made, reset and dropped there. Rows have a history: a random number that they get
// when the model is declared or reset. It tells rows that were trained from initial ones under the
// same name. A model that serves checkpoints may have several histories on a shard: the newest one
// that all shards serve is the one that is read.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/thread_pools.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/checkpoint/partition_file.h"
#include "server/rpc/call_context.h"
#include "server/step/served_model.h"
#include "server/step/shard_set.h"

namespace emberd::coordinator {

enum class ModelState {
  kUnknown,     // no shard could be asked
  kAbsent,      // nobody has it: never declared, or dropped
  kUnfinished,  // it is being declared, reset or dropped, or that was left half done
  kServing,     // all shards that answered have the same rows
  kLost,        // some shards have lost their rows
};

struct ModelVerdict {
  ModelState state = ModelState::kUnknown;
  uint64_t history = 0;      // kServing: of the rows
  std::vector<int> without;  // kLost: shards that do not have the rows that others have, or had
  std::string damage;        // kLost: why these cannot read them; empty: they do not have them
  std::string lost_change;   // kLost: what one shard has made, and another one has lost
};

// Answer i is shard i's. Immutable once made, but for SetLostChange.
class ShardModels {
 public:
  using Answer = absl::StatusOr<internal::v1::ListModelsResponse>;
  explicit ShardModels(std::vector<Answer> answers) : answers_(std::move(answers)) {}
  // Asks all shards at once.
  static ShardModels Ask(const step::ShardSet& shards, rpc::CallContext* context);

  // Whether all shards have answered: the first error.
  absl::Status complete() const;
  // Whether all shards have a model with rows of this history, which are being filled or just have
  // been: DATA_LOSS if one has none, ABORTED if one has others.
  absl::Status CheckUnfilled(uint64_t model_id, uint64_t history) const;
  // Whether shard 0 has answered, which is the one that knows the limits of models: its error.
  absl::Status know_limits() const { return answers_[0].status(); }
  size_t size() const { return answers_.size(); }

  // `known`: the history that the caller has seen; 0: none.
  ModelVerdict Judge(uint64_t model_id, uint64_t known) const;
  // Every history of a model that any shard has, each once, those that are served for longer first.
  // `serving`: all shards that have it serve it.
  std::vector<internal::v1::HostedModel> HistoriesOf(uint64_t model_id) const;
  // What a model serves under a history, or, with 0, newest; empty for one that is trained.
  internal::v1::ServedRows ServesOf(uint64_t model_id, uint64_t history) const;
  // The limits that a model was given while it was served, as shard 0 knows them: under a history,
  // or, with 0, the newest ones of any. Nothing if it did not answer.
  internal::v1::ModelLimits LimitsOf(uint64_t model_id, uint64_t history) const;
  // Models that have come back from the logs of these shards, which all shards serve.
  struct Returned {
    uint64_t model_id = 0;
    uint64_t history = 0;
    std::vector<int> shards;
  };
  std::vector<Returned> EveryReturned() const;
  // The shards have not made the same changes of it: see FindLostChange.
  void SetLostChange(uint64_t model_id, const std::string& lost) { lost_changes_[model_id] = lost; }
  // What all shards that answered say of a model: `pinned` and `pins_log` if any says so, the most
  // `changes`, and `model_id` if any knows the model. No other field is set.
  internal::v1::HostedModel Merged(uint64_t model_id) const;
  // Every model that is trained, once, with a shard that has it.
  struct Hosted {
    int shard = 0;
    internal::v1::HostedModel model;
  };
  std::vector<Hosted> EveryTrained() const;
  // Every model that any shard has, each once.
  std::vector<uint64_t> Ids() const;
  // The model of a name on any shard; 0: there is none.
  uint64_t FindName(const std::string& name) const;
  // What one shard has under a name, of several histories the newest that it serves. Empty if it
  // has nothing, or did not answer.
  internal::v1::HostedModel OnShard(int shard, const std::string& name) const;
  // All of that.
  std::vector<internal::v1::HostedModel> AllOnShard(int shard, const std::string& name) const;

 private:
  // use(shard, model) of all that shards have answered.
  template <typename Use>
  void ForEach(const Use& use) const;
  const internal::v1::HostedModel* Find(int shard, uint64_t model_id) const;
  // The newest that all shards that answered serve; 0: there is none.
  uint64_t WholeHistory(uint64_t model_id) const;
  bool Dropped(uint64_t history) const;

  std::vector<Answer> answers_;
  std::map<uint64_t, std::string> lost_changes_;  // by model
};

// Whether shards that came back from their logs have made the same changes of a model as the
// others. After a loss of power they may not: each disk may lack the newest records of a log, and
// how many is different from disk to disk (storage.fsync).
// Empty: they have. Else what one shard has made and another one has lost: it neither made it nor
// holds it, so that nobody can finish it. Trainers may be at work meanwhile. An error: that cannot
// be known now.
absl::StatusOr<std::string> FindLostChange(const step::ShardSet& shards, uint64_t model_id,
                                           uint64_t history, rpc::CallContext* context);

// A checkpoint that a model gets its rows from.
struct RowSource {
  checkpoint::CheckpointChain chain;
  step::BytesReport report;  // hears how far the shards are
  // Hears the history that the rows will have, before any shard gives up the rows that it has; and
  // hears 0 if files are damaged: an error then says that others took them away. Null: nobody does.
  std::function<absl::Status(uint64_t history)> begins = nullptr;
  // Asked before shards begin, and again before they serve the rows: an error gives these up; null:
  // they are wanted.
  std::function<absl::Status()> still_wanted = nullptr;
  bool only_lost = false;  // for a model that has lost rows: ABORTED if all shards have them again
};

// Notes that a model's checkpoints are not to bring back rows that are given up. `history`: see
// CheckpointStore::GiveUp.
using GiveUpRows = std::function<absl::Status(const std::string& model, uint64_t history)>;

// Calls `change`, which takes a model's rows from the shards and returns their history (0: there
// were none). Notes before and after it that no checkpoint is to bring these rows back, not even
// one that is saved meanwhile. `give_up`: null if no checkpoints bring rows back.
absl::Status TakeRows(const std::string& model, const GiveUpRows& give_up,
                      absl::FunctionRef<absl::StatusOr<uint64_t>()> change);

// Makes, resets and drops models on the shards. Each shard first makes the rows of a new history,
// then all are told to serve them, shard 0 first: where it serves a history, the model exists;
// where it does not, what other shards have made is a leftover that anybody may replace. So a
// coordinator may die anywhere, and two of them may declare the same model at once.
//
// Thread-safe. Errors name the shard.
class ModelChanges {
 public:
  // What it is given must outlive it.
  ModelChanges(const step::ShardSet& shards, preprocess::Topology topology, BlockingPool* threads)
      : shards_(shards), topology_(topology), threads_(threads) {}

  // What the shards have. Has those serve models that have come back from their logs, if they have
  // made the same changes as the others.
  ShardModels Ask(rpc::CallContext* context) const;

  // Makes rows of `history` in place of what `before` says, initial ones or, with `source`, those
  // of a checkpoint, and has them served, unless a client is to `fill` them first. ABORTED:
  // somebody else has changed the model since `before`, or shards differ in whose rows it shares.
  absl::Status Make(const step::ServedModel& model, uint64_t history, const ShardModels& before,
                    const RowSource* source, rpc::CallContext* context, bool fill = false);
  // Takes back what Make has left, unless it is served: under a deadline of its own, and for shards
  // that cannot be reached now, whenever Retry is called.
  void Undo(uint64_t model_id, uint64_t history);
  void Retry();

  // Drops whatever the shards have under a name, and remembers `known` (0: nothing) as dropped.
  // The history that shard 0 had, 0 if it had none; nullopt: there was nothing.
  absl::StatusOr<std::optional<uint64_t>> Drop(const std::string& name, uint64_t model_id,
                                               uint64_t known, rpc::CallContext* context);
  // One of the histories of a model that serves checkpoints. FAILED_PRECONDITION, and nothing has
  // changed, if shard 0 serves no other one and `unless_only` is set.
  absl::Status DropHistory(uint64_t model_id, uint64_t history, bool unless_only,
                           rpc::CallContext* context);

 private:
  struct Leftover {
    uint64_t model_id = 0;
    uint64_t history = 0;
    int shard = 0;
  };

  internal::v1::CreateModelRequest MakeRequest(const step::ServedModel& model, uint64_t history,
                                               const ShardModels& before, int shard) const;
  absl::Status RestoreOnAll(const step::ServedModel& model, uint64_t history,
                            const ShardModels& before, const RowSource& source,
                            rpc::CallContext* context);
  // False: the shard could not be reached.
  bool TakeBack(const Leftover& leftover);

  const step::ShardSet& shards_;
  const preprocess::Topology topology_;
  BlockingPool* const threads_;
  absl::Mutex mutex_;
  std::vector<Leftover> leftovers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::coordinator
