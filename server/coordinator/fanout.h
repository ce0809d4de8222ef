// What one step asks of all shards at once: gather, update, release.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "preprocess/batch/preprocessor.h"
#include "server/coordinator/gradients.h"
#include "server/coordinator/kept_batch.h"
#include "server/coordinator/model_registry.h"
#include "server/ops/metrics.h"
#include "server/rpc/call_context.h"
#include "server/shard/shard_backend.h"
#include "shard/gather/pooling.h"

namespace emberd::server {

struct FanoutOptions {
  absl::Duration batch_ttl;   // how long shards keep an unused batch
  absl::Duration shard_call;  // how long an update may take, whatever the caller's deadline
  int threads = 1;            // that pool unique rows, besides the callers'
};

// An update that every shard has checked and holds. If it goes away undecided, shards discard it
// (a group's part they keep, see ApplyHeader in shard_service.proto).
class StagedUpdate {
 public:
  virtual ~StagedUpdate() = default;
  // Makes the update on every shard. An error names a shard whose answer did not
  // come; the others have made the update. A group's part whose stream broke is decided by calls
  // of their own until the shard answers or time is over.
  virtual absl::StatusOr<RowCounts> Commit() = 0;
};

// Thread-safe. What the constructor is given must outlive it.
class Fanout {
 public:
  Fanout(std::vector<std::shared_ptr<ShardBackend>> shards, FanoutOptions options,
         ModelRegistry* registry, ops::Metrics* metrics);

  // Result i is shard i's, checked against the batch, all of it partial sums. A shard that lost the
  // model by restarting is given it again. The shards keep the batch under `handle`, unless that is
  // 0; after an error they do not.
  absl::StatusOr<std::vector<GatherResult>> Gather(
      const std::shared_ptr<const ServedModel>& model,
      const std::shared_ptr<const preprocess::PreprocessedBatch>& batch, uint64_t handle,
      rpc::CallContext* context);

  // What an update is known by: to the trainer's record, or as a part of a group's step.
  struct UpdateName {
    uint64_t handle = 0;
    Mutation mutation;
    std::optional<GroupPart> group_part;
  };
  // Shards change nothing yet. The caller's deadline and cancellation count up to here, and not for
  // the Commit: it is all or nothing. `batch` and the memory of `input` must outlive the result.
  absl::StatusOr<std::unique_ptr<StagedUpdate>> Stage(const GradientInput& input,
                                                      const KeptBatch& batch,
                                                      const UpdateName& name,
                                                      rpc::CallContext* context);

  // Best effort, under a deadline of its own: what is missed expires.
  void Release(uint64_t model_id, uint64_t handle);

  // Answer i is shard i's.
  absl::StatusOr<std::vector<internal::v1::OpenGroupResponse>> OpenGroup(
      const ServedModel& model, const internal::v1::OpenGroupRequest& request,
      rpc::CallContext* context);
  absl::StatusOr<RowCounts> DecideStep(int shard, const internal::v1::DecideStepRequest& request,
                                       rpc::CallContext* context) {
    return shards_[shard]->DecideStep(request, context);
  }

  // Makes a call to a shard; one that lost the model by restarting is given it again first.
  absl::Status WithModel(const ServedModel& model, int shard, rpc::CallContext* context,
                         const std::function<absl::Status()>& call);

 private:
  std::vector<int> AllShards() const;
  void ObserveLink(int shard, ops::Rpc rpc, const absl::Status& status, absl::Time began);

  class StagedOnShards;

  const std::vector<std::shared_ptr<ShardBackend>> shards_;
  const FanoutOptions options_;
  ModelRegistry* const registry_;
  ops::Metrics* const metrics_;
  const std::unique_ptr<shard::RowPooler> pooler_;
};

}  // namespace emberd::server
