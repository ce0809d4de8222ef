// What the shards say about their models, and what that means for one of them. Rows have a history:
// a random number that they get when the model is declared or reset. It tells rows that were
// trained from initial ones under the same name. A model that serves checkpoints may have several
// histories on a shard: the newest one that all shards serve is the one that is read.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "server/rpc/call_context.h"
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

}  // namespace emberd::coordinator
