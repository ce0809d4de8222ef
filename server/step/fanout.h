// What is asked of several shards at once: above all what a step asks, gather, update and release.
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
#include "base/buffers.h"
#include "base/thread_pools.h"
#include "preprocess/batch/preprocessor.h"
#include "server/host/shard_backend.h"
#include "server/ops/metrics.h"
#include "server/rpc/call_context.h"
#include "server/step/gradients.h"
#include "server/step/served_model.h"
#include "server/step/shard_set.h"
#include "server/step/shared_tensors.h"

namespace emberd::step {

struct FanoutOptions {
  absl::Duration batch_ttl;   // how long shards keep an unused batch
  absl::Duration shard_call;  // how long an update may take, whatever the caller's deadline
  // Gradients are copied to the shards: their logs must hold what is applied, and what lies in a
  // client's memory may change between the two.
  bool copy_gradients = false;
  ThreadPools* threads = nullptr;  // required
};

// What an update is known by: to the shards' records, or as one rank's part of a group's step.
struct UpdateName {
  uint64_t model_id = 0;
  uint64_t handle = 0;
  host::Mutation mutation = {};
  uint64_t attempt = 0;  // at the mutation
  std::optional<host::GroupPart> group_part = std::nullopt;
  bool skip = false;  // the group's step is counted, and changes no row
};

class Fanout;

// An update that every shard has checked and holds. If it goes away undecided, shards are told to
// drop it (a rank's part of a group's step they keep, see ApplyHeader in shard_service.proto).
class StagedUpdate {
 public:
  ~StagedUpdate();
  // Makes the update on every shard; once. An error names a shard whose answer did not come; the
  // others have made the update. Where a stream broke, the decision is sent again in calls of its
  // own until the shard answers or time is over. ABORTED: another attempt has taken charge.
  absl::StatusOr<host::RowCounts> Commit();
  // Every shard had made it before.
  bool replayed() const;

 private:
  friend class Fanout;
  StagedUpdate(Fanout* fanout, const UpdateName& name, const std::string& trace);
  absl::Status Stage(const GradientInput& input, const KeptBatch& batch, rpc::CallContext* context);
  absl::StatusOr<host::RowCounts> DecideAgain(int shard);

  Fanout* const fanout_;
  const UpdateName name_;
  rpc::CallContext context_;  // outlives the calls
  absl::Time deadline_;       // the caller's
  std::vector<std::unique_ptr<host::ApplyCall>> calls_;
  std::vector<bool> staged_;         // false: it had been made there before
  std::vector<uint64_t> histories_;  // by shard, of the rows that the batch has seen
  bool decided_ = false;
  host::RowCounts rows_;
};

// Thread-safe. What the constructor is given must outlive it.
class Fanout {
 public:
  Fanout(const ShardSet& shards, FanoutOptions options, Mutations* mutations,
         ops::Metrics* metrics);

  // Result i is shard i's, checked against the batch, all of it partial sums. The shards keep the
  // batch under `handle`, unless that is 0; after an error they do not. Shards that can write to
  // `output`, where the activations of type `dtype` go, have done so with what result.places says.
  absl::StatusOr<std::vector<host::GatherResult>> Gather(
      const ServedModelPtr& model,
      const std::shared_ptr<const preprocess::PreprocessedBatch>& batch, uint64_t handle,
      v1::DataType dtype, const std::shared_ptr<const SharedOutput>& output,
      rpc::CallContext* context);

  // No row changes yet. The caller's deadline and cancellation count up to here, and not for the
  // Commit: it is all or nothing. `batch` and the memory of `input` must outlive the result.
  absl::StatusOr<std::unique_ptr<StagedUpdate>> Stage(const GradientInput& input,
                                                      const KeptBatch& batch,
                                                      const UpdateName& name,
                                                      rpc::CallContext* context);

  // Memory of clients that shards were lent and nobody refers to. To be called often.
  void TakeBackRegions() {
    for (size_t i = 0; i < shards_.size(); ++i) shards_[i].TakeBackRegions();
  }

  // Both best effort, under a deadline of their own: what is missed expires. After a shard has
  // missed it, nothing is released there for a while.
  void RenewBatches(const std::vector<uint64_t>& handles);
  void Release(uint64_t model_id, uint64_t handle);

  CpuPool* cpu() const { return &options_.threads->cpu; }

 private:
  friend class StagedUpdate;
  // What each shard is sent; `alone`: of an update of one rank.
  void LayOut(const GradientInput& input, const KeptBatch& batch, bool alone,
              std::vector<ShardGradients>* gradients);
  void ObserveLink(int shard, ops::Rpc rpc, const absl::Status& status, absl::Time began);
  // Whether the shard may read gradients where the client has put them.
  bool ReadsInPlace(const GradientInput& input, const KeptBatch& batch, int shard) const;

  const ShardSet& shards_;
  const FanoutOptions options_;
  Mutations* const mutations_;
  ops::Metrics* const metrics_;
  BufferPool pool_;
  std::vector<std::atomic<int64_t>> release_after_ms_;  // by shard, of SteadyNow
};

}  // namespace emberd::step
