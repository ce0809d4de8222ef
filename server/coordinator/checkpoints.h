// Checkpoints as a coordinator offers them: CheckpointService serves this, and what saves and
// restores by itself uses it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "emberd/v1/cluster.pb.h"
#include "server/checkpoint/store.h"
#include "server/coordinator/change_pause.h"
#include "server/coordinator/model_registry.h"
#include "server/rpc/call_context.h"
#include "server/step/shard_set.h"

namespace emberd::coordinator {

// Saves one checkpoint: fixes its moment on all shards, waits until they have written it, and makes
// it a checkpoint by its manifest.
struct SaveOptions {
  std::string name = {};     // empty: see SaveCheckpointRequest
  bool incremental = false;  // where it is possible
  int max_chain = 0;         // of incremental ones
  bool automatic = false;
  bool has_log = false;  // storage.durability LOG
  // If set, the moment is to be right before this step of the group.
  std::optional<v1::GroupStep> before = std::nullopt;
};

// What an automatic one that is saved now is called.
std::string AutomaticName();

// A model, and its checkpoint.
struct SavedModel {
  step::ServedModelPtr model;
  std::unique_ptr<ChangePause> pause;
  std::string folder = {};  // empty: it is not there, or a checkpoint
  v1::CheckpointManifest manifest = {};
};

// By one thread at a time: Begin, then Finish. If it goes away before, nothing is left of it.
class CheckpointSave {
 public:
  // What it is given must outlive it. `models`: the one that is to be saved, and those that are
  // saved at the same moment, each as an automatic checkpoint.
  CheckpointSave(const step::ShardSet& shards, const checkpoint::CheckpointStore* store,
                 std::vector<SavedModel> models, SaveOptions options);
  ~CheckpointSave();

  // Fixes the moment. Changes go on when it returns, whatever it returns.
  absl::Status Begin(rpc::CallContext* context);
  // After Begin: whether it is incremental and would, with those that it builds on, take more than
  // one and a half times the bytes of a full one.
  bool IsLarge(rpc::CallContext* context);
  // Waits for the files, and makes them checkpoints: of all models, or after an error of none.
  absl::Status Finish(rpc::CallContext* context, const step::BytesReport& report);

  const step::ServedModel& model() const { return *models_.front().model; }
  const std::vector<SavedModel>& models() const { return models_; }
  absl::Duration paused() const { return paused_; }

 private:
  // The checkpoint that this one may build on; nothing if it has to be whole.
  void ChooseParent(const ChangePause::Answers& answers);
  absl::Status CheckStep(const ChangePause::Answers& answers) const;
  void FillManifest(const ChangePause::Answers& answers, SavedModel* saved) const;
  // `answers`: by model.
  absl::Status BeginOnShards(const std::vector<ChangePause::Answers>& answers,
                             rpc::CallContext* context);
  // An error of another model than the one that was asked for, with its name.
  absl::Status OfOther(const absl::Status& status, size_t m) const;
  absl::Status Commit(rpc::CallContext* context);

  const step::ShardSet& shards_;
  const checkpoint::CheckpointStore* const store_;
  std::vector<SavedModel> models_;
  v1::CheckpointManifest& manifest_;  // of the first
  const SaveOptions options_;
  const uint64_t checkpoint_id_;
  step::ShardTransfers transfers_;
  int64_t most_bytes_ = 0;  // see IsLarge
  absl::Duration paused_;
};

// Calls `begin` until it is not refused, with ABORTED, for another save of the model: for a minute,
// or to `until`, or until `over`.
absl::Status InTurn(absl::Time until, absl::FunctionRef<bool()> over,
                    absl::FunctionRef<absl::Status()> begin);

// Tells operators which checkpoints of a model were passed over for their damage. `taken`: the one
// that was taken instead, or why none was.
void LogPassedOver(const std::string& model, const checkpoint::CheckpointStore::Damages& damaged,
                   const std::string& taken);

// Thread-safe. Methods block until the work is done; what they mean and their errors:
// checkpoint_service.proto.
class Checkpoints {
 public:
  // Hears how far the work is. An error, as when nobody listens any more, ends it.
  using Report = std::function<absl::Status(const v1::CheckpointProgress&)>;
  using Progress = absl::StatusOr<v1::CheckpointProgress>;  // the last message

  // What the arguments point to must outlive it.
  Checkpoints(const v1::StorageConfig& storage, const step::ShardSet& shards,
              step::Mutations* mutations, ModelRegistry* registry, BlockingPool* threads)
      : storage_(storage),
        store_(storage.checkpoints()),
        shards_(shards),
        mutations_(mutations),
        registry_(registry),
        later_(threads, kSavesAtOnce, /*max_queued=*/0) {}
  // Gives up what runs on threads of its own.
  ~Checkpoints() { stopping_.Cancel(); }

  // FAILED_PRECONDITION: the cluster description has no storage.
  absl::Status CheckEnabled() const;
  const checkpoint::CheckpointStore& store() const { return store_; }
  const v1::StorageConfig& storage() const { return storage_; }
  bool has_log() const { return storage_.durability() == v1::StorageConfig::LOG; }

  Progress Save(const v1::SaveCheckpointRequest& request, const Report& report,
                rpc::CallContext* context);
  Progress Restore(const v1::RestoreCheckpointRequest& request, const Report& report,
                   rpc::CallContext* context);
  Progress Serve(const v1::ServeCheckpointRequest& request, const Report& report,
                 rpc::CallContext* context);
  // Loads again what a model serves that has lost rows. NOT_FOUND: the checkpoint is gone.
  absl::StatusOr<step::ServedModelPtr> ServeAgain(const step::ServedModel& lost,
                                                  const step::BytesReport& report,
                                                  rpc::CallContext* context);
  Progress Verify(const v1::VerifyCheckpointRequest& request, const Report& report,
                  rpc::CallContext* context);
  Progress Merge(const v1::MergeCheckpointRequest& request, const Report& report,
                 rpc::CallContext* context);
  absl::StatusOr<v1::DiffCheckpointsResponse> Diff(const v1::DiffCheckpointsRequest& request,
                                                   rpc::CallContext* context);
  absl::StatusOr<v1::ListCheckpointsResponse> List(const v1::ListCheckpointsRequest& request,
                                                   rpc::CallContext* context);
  absl::StatusOr<v1::CheckpointManifest> Get(const v1::GetCheckpointRequest& request,
                                             rpc::CallContext* context);
  absl::StatusOr<v1::DeleteCheckpointResponse> Delete(const v1::DeleteCheckpointRequest& request,
                                                      rpc::CallContext* context);
  // Gives the next rows of a table; nothing after the last.
  using NextRows = std::function<absl::StatusOr<std::optional<v1::ExportCheckpointResponse>>()>;
  absl::StatusOr<NextRows> StartExport(const v1::ExportCheckpointRequest& request,
                                       rpc::CallContext* context);

  // The two parts of Save. `pause` may hold back a group's later steps already.
  absl::StatusOr<std::unique_ptr<CheckpointSave>> BeginSave(step::ServedModelPtr model,
                                                            SaveOptions options,
                                                            std::unique_ptr<ChangePause> pause,
                                                            rpc::CallContext* context);
  absl::StatusOr<v1::CheckpointInfo> FinishSave(CheckpointSave* save,
                                                const step::BytesReport& report,
                                                rpc::CallContext* context);
  // Finishes it on a thread of its own, if there is one. `done` hears of the end, and logs errors.
  void FinishLater(std::unique_ptr<CheckpointSave> save,
                   std::function<void(const absl::Status&)> done);
  // Of those that FinishLater has taken.
  int unfinished() const { return later_.tasks(); }
  std::unique_ptr<ChangePause> MakePause(step::ServedModelPtr model) const;

  // Where a model is to get its rows from that asks for a checkpoint ("newest": the newest).
  absl::StatusOr<RowSource> FindRows(const std::string& model, const std::string& name) const;

 private:
  // None waits for its turn: shards give up a save that nobody asks about.
  static constexpr int kSavesAtOnce = 64;

  // Reads every byte of a chain on all shards.
  absl::Status CheckFiles(const checkpoint::CheckpointChain& chain, const step::BytesReport& report,
                          rpc::CallContext* context);
  absl::StatusOr<checkpoint::CheckpointChain> ChainOf(const std::string& model,
                                                      const std::string& name) const;
  // Of a model without checkpoints. NOT_FOUND: it is not declared either, so that its name is
  // probably misspelt.
  absl::Status CheckName(const std::string& model, rpc::CallContext* context) const;
  // NOT_FOUND: another call has deleted the checkpoint. ABORTED: has replaced or merged it.
  absl::Status CheckStands(const checkpoint::CheckpointChain& chain) const;
  // `status`; but where it is DATA_LOSS because another call has taken the files away, the error of
  // CheckStands: nothing is damaged then.
  absl::Status Explain(const checkpoint::CheckpointChain& chain, const absl::Status& status) const;
  RowSource SourceOf(checkpoint::CheckpointChain chain, step::BytesReport report) const;
  // The model, and with a log those whose changes are in its rows: they are saved at one moment,
  // for the logs follow from that.
  std::vector<SavedModel> SavedWith(const step::ServedModelPtr& model,
                                    std::unique_ptr<ChangePause> pause) const;
  // FAILED_PRECONDITION: rows that a model shares may follow from this checkpoint of another one.
  absl::Status CheckNotShared(const v1::CheckpointManifest& manifest) const;
  // As CheckpointStore::RemoveAutomatic, with what storage.keep says.
  absl::StatusOr<int64_t> RemoveAutomatic(const std::string& model, uint64_t history,
                                          int64_t given_up) const;
  // It is a checkpoint now; `paused`: how long changes waited for that.
  void NoteSaved(const SavedModel& saved, absl::Duration paused) const;
  // Sets the metric of what the model's checkpoints take of the disk. `saved`: has just been saved;
  // warns if those that were saved on request take much. Null: none.
  void CountStored(const step::ServedModel& model, const v1::CheckpointInfo* saved) const;
  // Of the rows of a model that the shards have logs of; 0: there are none.
  absl::StatusOr<uint64_t> LoggedHistory(const std::string& model, rpc::CallContext* context);

  const v1::StorageConfig storage_;
  const checkpoint::CheckpointStore store_;
  const step::ShardSet& shards_;
  step::Mutations* const mutations_;
  ModelRegistry* const registry_;
  rpc::CallContext stopping_{absl::InfiniteFuture()};  // of what nobody waits for
  TaskQueue later_;  // last: its destructor waits for what uses the rest
};

}  // namespace emberd::coordinator
