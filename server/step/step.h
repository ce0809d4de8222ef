// The one path of a step, for unary calls and training streams alike:
//
//   lookup:  decode -> make room for the answer -> sort -> [agree on cuts] -> cut ->
//            [may gather] -> gather -> keep -> combine
//   update:  claim -> read -> stage on all shards -> [all staged] -> commit on all shards
//            (a unary one again, if another attempt at it was in the way: see shard_set.h)
//
// In brackets: where a rank of a group waits for others, see StepHooks. A unary call does not. See
// docs/step.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "base/regions.h"
#include "base/thread_pools.h"
#include "emberd/v1/embedding_service.pb.h"
#include "preprocess/batch/preprocessor.h"
#include "server/host/shard_backend.h"
#include "server/ops/metrics.h"
#include "server/rpc/call_context.h"
#include "server/step/activations.h"
#include "server/step/gradients.h"
#include "server/step/served_model.h"
#include "server/step/shard_set.h"

namespace emberd::step {

// What an update is known by: to the shards' records, or as one rank's part of a group's step.
struct UpdateName {
  uint64_t model_id = 0;
  uint64_t handle = 0;
  host::Mutation mutation = {};
  uint64_t attempt = 0;  // at the mutation
  std::optional<host::GroupPart> group_part = std::nullopt;
  bool skip = false;  // the group's step is counted, and changes no row
};

// What happens between the stages of a step. This base does nothing: a unary call is a group of
// one. Methods may wait for as long as they like; an error ends the step.
class StepHooks {
 public:
  virtual ~StepHooks() = default;
  // Whether the batch of any rank needs cuts; `mine`: this one's does.
  virtual absl::StatusOr<bool> AnyNeedsCuts(bool mine) { return mine; }
  // The cuts that all ranks make; `mine`: those that this rank's batch needs.
  virtual absl::StatusOr<uint64_t> CutsOfAll(uint64_t mine) { return mine; }
  // The batch is preprocessed; rows are read next.
  virtual absl::Status BeforeGather() { return absl::OkStatus(); }
  // For callers without a deadline: how long shards may take to gather.
  virtual absl::Duration gather_limit() const { return absl::InfiniteDuration(); }
  // Whether the batch lives as long as the caller says, who discards it: it does not expire.
  virtual bool owns_batch() const { return false; }
  // All shards have gathered, and keep the batch under this handle.
  virtual void OnKept(uint64_t batch_handle) {}
  // All shards hold this update, which is committed next.
  virtual absl::Status BeforeCommit() { return absl::OkStatus(); }
};

// A batch between its preprocessing and its lookups, of which there may be several.
struct PreparedLookup {
  ServedModelPtr model;  // outlives the batch, as its preprocessor must
  std::shared_ptr<const preprocess::PreprocessedBatch> batch;
  std::vector<int> order;  // features of the config, as the request lists them
  v1::DataType activation_dtype = v1::FLOAT32;
  int64_t activation_bytes = 0;                // of the answer
  rpc::CallContext::Room room;                 // for one answer; null: LookUp makes some
  std::shared_ptr<const SharedOutput> output;  // where the activations go; null: into the answer
  bool tiny = false;  // so little work that no other thread can help with it
};

// Thread-safe. Methods block until the answer is there; `context` carries the caller's deadline and
// cancellation. After an error nothing is kept and no row has changed, except as Update says.
class StepPath {
 public:
  struct Options {
    int64_t max_activation_bytes = 0;  // of one lookup
    absl::Duration batch_ttl;          // an unused batch is kept for so long
    absl::Duration shard_call;        // how long an update may take, whatever the caller's deadline
    rpc::HandleStoreOptions batches;  // how many may be kept
    const RegionServer* regions = nullptr;  // memory shared with clients; null: there is none
    // Gradients are copied to the shards: their logs must hold what is applied, and what lies in a
    // client's memory may change between the two.
    bool copy_gradients = false;
    ThreadPools* threads = nullptr;  // required

    // An update that has taken its batch here may wait on a shard until its time is over. So the
    // coordinator alone says when a batch expires; shards drop theirs later, also unused ones.
    absl::Duration BatchTtlOnShards() const { return batch_ttl + shard_call; }
  };
  // What the constructor is given must outlive it.
  StepPath(const ShardSet& shards, const Options& options, Mutations* mutations,
           ops::Metrics* metrics)
      : shards_(shards),
        options_(options),
        mutations_(mutations),
        metrics_(metrics),
        release_after_ms_(shards.size()),
        batches_(options.batches) {}

  // Fills `times` on success, but for what hooks waited. The batch is kept for an update unless the
  // request is for inference.
  absl::StatusOr<LookupOutput> Lookup(const ServedModelPtr& model, const v1::LookupRequest& request,
                                      rpc::CallContext* context, StepHooks* hooks,
                                      v1::StepTimes* times);
  // The same in two parts; the first ignores the `inference` of the request. `later`: another call
  // does the second, so no room is made for the answer, and `shared.activations` is not allowed.
  absl::StatusOr<PreparedLookup> Prepare(const ServedModelPtr& model,
                                         const v1::LookupRequest& request, bool later,
                                         rpc::CallContext* context, StepHooks* hooks,
                                         v1::StepTimes* times);
  absl::StatusOr<LookupOutput> LookUp(const PreparedLookup& prepared, bool inference,
                                      rpc::CallContext* context, StepHooks* hooks,
                                      v1::StepTimes* times);

  // Updates the rows of the batch that `name` names, and forgets the batch. The handle and the
  // mutation in `gradients` do not count, nor does the attempt in the name.
  // After an error the batch is still there, and some shards may have made the update if it came
  // from the commit: the same update under the same name finishes it, here or at another
  // coordinator, which does not need the batch for that. NOT_FOUND: there is no batch, and no shard
  // has made the update; it may be tried under the same name with another batch.
  absl::StatusOr<MadeMutation> Update(const UpdateName& name,
                                      const v1::ApplyGradientsRequest& gradients,
                                      rpc::CallContext* context, StepHooks* hooks,
                                      v1::StepTimes* times);

  // Gives back a batch that will not be updated. NOT_FOUND if there is none, UNAVAILABLE while an
  // update uses it.
  absl::Status Release(uint64_t model_id, uint64_t handle);
  // The same for a batch that may be gone or in use, as far as shards can be reached.
  void Discard(uint64_t model_id, uint64_t handle);

  // Sees that shards keep the batches of streams that are at work: best effort, under a deadline of
  // its own. To be called often.
  void RenewBatches();
  // Memory of clients that shards were lent and nobody refers to. To be called often.
  void TakeBackRegions() {
    for (size_t i = 0; i < shards_.size(); ++i) shards_[i].TakeBackRegions();
  }

  // The batches between their lookup and their update.
  BatchStore& batches() { return batches_; }

 private:
  using Batch = std::shared_ptr<const preprocess::PreprocessedBatch>;
  class StagedUpdate;

  absl::StatusOr<Batch> Preprocess(const ServedModel& model,
                                   absl::Span<const preprocess::FeatureInput> features,
                                   StepHooks* hooks, absl::Duration* time);
  // Result i is shard i's, checked against the batch, all of it partial sums. The shards keep the
  // batch under `handle`, unless that is 0; after an error they do not. Shards that can write to
  // `output`, where the activations of type `dtype` go, have done so with what result.places says.
  absl::StatusOr<std::vector<host::GatherResult>> Gather(
      const ServedModelPtr& model, const Batch& batch, uint64_t handle, v1::DataType dtype,
      const std::shared_ptr<const SharedOutput>& output, rpc::CallContext* context);
  absl::Status Keep(const PreparedLookup& prepared, absl::Span<const host::GatherResult> results,
                    uint64_t handle, absl::Time expiry);
  // One attempt.
  absl::StatusOr<MadeMutation> TryUpdate(const UpdateName& name, const GradientInput& input,
                                         const KeptBatch& batch, rpc::CallContext* context,
                                         StepHooks* hooks, v1::StepTimes* times);
  // The batch for this caller alone. INVALID_ARGUMENT if it belongs to another model.
  absl::StatusOr<std::shared_ptr<const KeptBatch>> Claim(uint64_t model_id, uint64_t handle);

  // Best effort, under a deadline of its own: what is missed expires. A shard that has missed a
  // release is sent no other for a while.
  void ReleaseOnShards(uint64_t model_id, uint64_t handle);
  void ObserveLink(int shard, ops::Rpc rpc, const absl::Status& status, absl::Time began);

  const ShardSet& shards_;
  const Options options_;
  Mutations* const mutations_;
  ops::Metrics* const metrics_;
  BufferPool pool_;
  std::vector<std::atomic<int64_t>> release_after_ms_;  // by shard, of SteadyNow
  BatchStore batches_;
  absl::Time renewed_;  // when shards were last told; used by RenewBatches alone
};

}  // namespace emberd::step
