// The models that a coordinator serves. It remembers plans and the history of their rows: a model
// that another coordinator declared, or that this one knew before a restart, is found again on the
// shards. A shard that comes back without the rows of a model makes the model *lost*: nobody gets
// initial rows for trained ones, until somebody resets or drops it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "base/thread_pools.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/embedding_service.pb.h"
#include "server/coordinator/shard_models.h"
#include "server/rpc/call_context.h"
#include "server/step/served_model.h"
#include "server/step/shard_set.h"

namespace emberd::coordinator {

struct ModelRegistryOptions {
  preprocess::Topology topology;
  ThreadPools* threads = nullptr;  // required; must outlive the registry and its models
  ops::Metrics* metrics = nullptr;
  // What to tell the callers of a lost model, given what they would be told; null: just that.
  std::function<absl::Status(const std::string& model, const absl::Status& lost)> explain_lost;
  // Called before rows that shards have are given up; after its error, none are.
  GiveUpRows give_up;
  // Models that lost rows go back to checkpoints by themselves, each to its own.
  bool recovers = false;
};

// Thread-safe. One declaration, reset or drop runs at a time.
class ModelRegistry {
 public:
  // `shards` must outlive it.
  ModelRegistry(const step::ShardSet& shards, ModelRegistryOptions options);

  struct Declared {
    step::ServedModelPtr model;
    bool created = false;
    bool unfilled = false;  // the caller is to assign its rows (HasAssignedTable)
  };
  // Makes the model on all shards, or on none: whatever becomes of the caller, what was made is
  // taken back after a failure, unless another coordinator has finished it. DATA_LOSS if it is
  // lost.
  // `find_rows` is asked for a checkpoint to begin with, unless the model is there; null: none.
  // `filled`: see DeclareModelRequest.
  using FindRows =
      std::function<absl::StatusOr<std::optional<RowSource>>(const v1::ModelConfig& config)>;
  absl::StatusOr<Declared> Declare(v1::ModelConfig config, const FindRows& find_rows,
                                   rpc::CallContext* context, uint64_t filled = 0);
  // False: there was none. `settle` runs before a model goes that shares tables with others: if a
  // step on their rows has begun, no shard may lack its part. The error of `settle` is the result,
  // and nothing goes.
  using SettleChanges = std::function<absl::Status(const step::ServedModelPtr& model)>;
  absl::StatusOr<bool> Drop(const std::string& name, const SettleChanges& settle,
                            rpc::CallContext* context);
  // Initial rows on all shards, under a new history. NOT_FOUND if nobody has declared it.
  absl::StatusOr<step::ServedModelPtr> Reset(const std::string& name, rpc::CallContext* context);
  // The rows of a checkpoint on all shards, under a new history, in place of what is there.
  // ALREADY_EXISTS: another model of the name is served.
  absl::StatusOr<step::ServedModelPtr> Restore(v1::ModelConfig config, const RowSource& source,
                                               rpc::CallContext* context);
  // Has a model of this config, with optimizer none, serve a checkpoint from now on. The rows are
  // loaded beside those that it serves until then, which go some seconds later. ALREADY_EXISTS:
  // another model of the name is there, or one that serves no checkpoint. RESOURCE_EXHAUSTED: both
  // do not fit. UNAVAILABLE: it is getting other rows just now.
  absl::StatusOr<step::ServedModelPtr> Serve(v1::ModelConfig config, const RowSource& source,
                                             rpc::CallContext* context);

  // Gives a model that is served other limits. What is refused changes nothing.
  absl::StatusOr<v1::SetLimitsResponse> SetLimits(const v1::SetLimitsRequest& request,
                                                  rpc::CallContext* context);

  // NOT_FOUND if no shard has it; UNAVAILABLE if none can be asked, or if it is being declared,
  // reset or dropped; DATA_LOSS if it is lost.
  absl::StatusOr<step::ServedModelPtr> Find(uint64_t model_id, rpc::CallContext* context);
  // The same, but always asks the shards: another coordinator may have reset the model just now.
  // For calls that go on for long with one history.
  absl::StatusOr<step::ServedModelPtr> FindAnew(uint64_t model_id, rpc::CallContext* context);
  // One that is being filled: AssignRowsRequest.history.
  absl::StatusOr<step::ServedModelPtr> FindUnfilled(uint64_t model_id, uint64_t history,
                                                    rpc::CallContext* context);
  absl::StatusOr<step::ServedModelPtr> FindByName(const std::string& name,
                                                  rpc::CallContext* context);
  // The same as FindAnew, or what has taken its place under the name.
  absl::StatusOr<step::ServedModelPtr> FindByNameAnew(const std::string& name,
                                                      rpc::CallContext* context);

  // DATA_LOSS if the model is known to be lost. Asks nobody if it is not.
  absl::Status CheckNotLost(uint64_t model_id, rpc::CallContext* context);

  // What to tell the caller of a call on rows of `history` (0: of any) that ended with `status`.
  // Shards say DATA_LOSS if they do not have these rows; this finds out why. ABORTED: the model was
  // reset, or dropped and declared again.
  absl::Status Explain(uint64_t model_id, uint64_t history, const absl::Status& status);

  // Calls call(model) on the model that find() gives, and explains a DATA_LOSS. If the model was
  // reset or declared again since this coordinator heard of it, or serves another checkpoint, it is
  // found and called again.
  template <typename Finder, typename Call>
  auto OnModel(const Finder& find, const Call& call) -> decltype(call(step::ServedModelPtr()));
  template <typename Call>
  auto OnModel(uint64_t model_id, rpc::CallContext* context, const Call& call)
      -> decltype(call(step::ServedModelPtr())) {
    return OnModel([&] { return Find(model_id, context); }, call);
  }

  // Learns of all models that shards have, looks for lost ones, and takes back what failed
  // declarations have left. Call it before the first request, and then every second.
  void Watch();
  // Learns of models that others have declared just now.
  void Learn(rpc::CallContext* context) { LearnModels(changes_.Ask(context)); }

  struct Known {
    step::ServedModelPtr model;
    std::string lost;      // what to say about it; empty: it is not lost
    bool doubted = false;  // it seemed lost when Watch looked last
    // As shards said when Watch asked last: see ShardModels::Merged.
    internal::v1::HostedModel rows;
    absl::Time followed = absl::InfiniteFuture();  // since when shards have rows that it replaced

    uint64_t history() const { return model == nullptr ? 0 : model->history; }
    // Counts it in the metrics, too: beyond kMaxStackLabels, several models share a label.
    void SetLost(std::string why) {
      model->metrics->Change(ops::MetricId::kModelLost, int{!why.empty()} - int{!lost.empty()});
      lost = std::move(why);
    }
  };
  // By name.
  std::vector<Known> models() const;
  // What is known without asking anybody; nothing for a model that is not.
  Known Recall(uint64_t model_id) const;
  uint64_t IdOf(const std::string& name) const;  // 0: it is not known

 private:
  // For what changes models, one after another. A call waits until its deadline or its end, and no
  // longer: it holds a thread that others need.
  struct Turn {
    absl::Mutex mutex;
    bool taken ABSL_GUARDED_BY(mutex) = false;
  };
  static absl::StatusOr<std::shared_ptr<const void>> Take(Turn* turn, rpc::CallContext* context) {
    const auto is_free = [turn]() ABSL_SHARED_LOCKS_REQUIRED(turn->mutex) { return !turn->taken; };
    absl::MutexLock lock(&turn->mutex);
    while (!AwaitSteadily(&turn->mutex, absl::Condition(&is_free), absl::Milliseconds(50))) {
      if (context->cancelled()) return absl::CancelledError("the caller is gone");
      if (SteadyNow() < context->deadline()) continue;
      return absl::DeadlineExceededError(
          "another change of a model went on until the deadline of the call; try again");
    }
    turn->taken = true;
    return std::shared_ptr<const void>(turn, [turn](const void*) {
      absl::MutexLock lock(&turn->mutex);
      turn->taken = false;
    });
  }
  // `fresh`: made of the config if it is needed, so that attempts share it.
  absl::StatusOr<Declared> TryDeclare(v1::ModelConfig config, const FindRows& find_rows,
                                      uint64_t filled, std::shared_ptr<step::ServedModel>* fresh,
                                      rpc::CallContext* context);
  // ALREADY_EXISTS with the first field that differs from what is there, or OK. A config that
  // differs in planned samples alone becomes that of what is there.
  absl::Status CheckName(const ShardModels& shards, rpc::CallContext* context,
                         v1::ModelConfig* config);
  // For tables that are to be shared with models that are there, which give them their seed_name.
  // ALREADY_EXISTS: the rows do not agree. `changes_rows`: FAILED_PRECONDITION if any model shares
  // them.
  absl::Status CheckShared(v1::ModelConfig* requested, bool changes_rows, const ShardModels& shards,
                           rpc::CallContext* context);
  // Nothing to do unless its rows are whole, and it shares some.
  absl::Status SettleShared(uint64_t model_id, const SettleChanges& settle, ShardModels* shards,
                            rpc::CallContext* context);
  // Asks the shards, and brings what is known of the model up to date.
  absl::StatusOr<step::ServedModelPtr> Refresh(uint64_t model_id, rpc::CallContext* context);
  // What the shards say of a model; asks again, if it seems lost, what may just be changing.
  ModelVerdict Judge(uint64_t model_id, uint64_t known, ShardModels* shards,
                     rpc::CallContext* context);
  // The config, from a shard that has it, with rows of `history`, as `shards` say.
  absl::StatusOr<std::shared_ptr<step::ServedModel>> Fetch(uint64_t model_id, uint64_t history,
                                                           const ShardModels& shards,
                                                           rpc::CallContext* context);
  absl::StatusOr<std::shared_ptr<step::ServedModel>> MakeModel(v1::ModelConfig config,
                                                               uint64_t history) const;
  // Gives new rows of a model the limits that it was given while it was served.
  void KeepLimits(const ShardModels& shards, const step::ServedModel& model) const {
    model.SetLimits(shards.LimitsOf(model.id, 0));
    // Shard 0 may have lost them with the rows.
    const Known known = Recall(model.id);
    if (known.model == nullptr || shards.OnShard(0, model.config.name()).history() != 0) return;
    model.SetLimits(known.model->LimitsNow());
  }
  absl::Status LostError(const step::ServedModel& model, const ModelVerdict& verdict) const;
  // What Serve must not find.
  absl::Status CheckServable(const step::ServedModel& model, const ShardModels& shards,
                             rpc::CallContext* context);
  // Sees that shards hold one history of the model at most, and gives the next one its version.
  // Returns a history that stays though some shards have lost its rows; 0: there is none.
  absl::StatusOr<uint64_t> MakeRoomBeside(step::ServedModel* model, rpc::CallContext* context);
  // All shards serve the rows of `source`, or none.
  absl::Status MakeServed(const step::ServedModel& model, const RowSource& source,
                          rpc::CallContext* context);
  // Those on the shards that are not known here, as after a restart of the process.
  void LearnModels(const ShardModels& shards);
  // Gives up rows that others have replaced, when they have for a while.
  void DropFollowed(const step::ServedModel& model, const ShardModels& shards,
                    rpc::CallContext* context);

  // In place of every other model of this name.
  void Remember(step::ServedModelPtr model);
  void Forget(uint64_t model_id);
  void SetLost(uint64_t model_id, const absl::Status& why);

  const step::ShardSet& shards_;
  const ModelRegistryOptions options_;
  ModelChanges changes_;
  Turn changing_;
  Turn serving_;  // instead, while rows are loaded beside others: no change waits for it
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<uint64_t, Known> models_ ABSL_GUARDED_BY(mutex_);
};

template <typename Finder, typename Call>
auto ModelRegistry::OnModel(const Finder& find, const Call& call)
    -> decltype(call(step::ServedModelPtr())) {
  for (int calls_left = 3; calls_left >= 0; --calls_left) {
    ASSIGN_OR_RETURN(const auto model, find());
    auto result = call(model);
    if (result.ok()) return result;
    absl::Status status = Explain(model->id, model->history, result.status());
    if (calls_left == 0 || !absl::IsAborted(status) || absl::IsAborted(result.status()))
      return status;
  }
  return absl::InternalError("unreachable");
}

}  // namespace emberd::coordinator
