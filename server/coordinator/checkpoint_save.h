// Saves one checkpoint: fixes its moment on all shards, waits until they have written it, and makes
// it a checkpoint by its manifest.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "server/checkpoint/store.h"
#include "server/coordinator/change_pause.h"
#include "server/coordinator/shard_transfers.h"

namespace emberd::server {

struct SaveOptions {
  std::string name = {};     // empty: see SaveCheckpointRequest
  bool incremental = false;  // where it is possible
  int max_chain = 0;         // of incremental ones
  bool automatic = false;
  bool has_log = false;  // storage.durability LOG
  // If set, the moment is to be right before this step of the group.
  std::optional<v1::GroupStep> before = std::nullopt;
};

// By one thread at a time: Begin, then Finish. If it goes away before, nothing is left of it.
class CheckpointSave {
 public:
  // What it is given must outlive it.
  CheckpointSave(const ShardSet& shards, const CheckpointStore* store,
                 std::shared_ptr<const ServedModel> model, SaveOptions options);
  ~CheckpointSave();

  // Fixes the moment. Changes go on when it returns, whatever it returns.
  absl::Status Begin(std::unique_ptr<ChangePause> pause, rpc::CallContext* context);
  // After Begin: whether it is incremental and would, with those that it builds on, take more than
  // one and a half times the bytes of a full one.
  bool IsLarge(rpc::CallContext* context);
  // Waits for the files, and returns the manifest of what is now a checkpoint.
  absl::StatusOr<v1::CheckpointManifest> Finish(rpc::CallContext* context,
                                                const BytesReport& report);

  const ServedModel& model() const { return *model_; }
  absl::Duration paused() const { return paused_; }

 private:
  // The checkpoint that this one may build on; nothing if it has to be whole.
  void ChooseParent(const ChangePause::Answers& answers);
  absl::Status CheckStep(const ChangePause::Answers& answers) const;
  void FillManifest(const ChangePause::Answers& answers);
  absl::Status BeginOnShards(uint64_t pause_id, const ChangePause::Answers& answers,
                             rpc::CallContext* context);

  const ShardSet& shards_;
  const CheckpointStore* const store_;
  const std::shared_ptr<const ServedModel> model_;
  const SaveOptions options_;
  ShardTransfers transfers_;
  std::string folder_;
  v1::CheckpointManifest manifest_;
  int64_t most_bytes_ = 0;  // see IsLarge
  absl::Duration paused_;
};

}  // namespace emberd::server
