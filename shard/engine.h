// The emulated SparseCores of one shard process: rows and optimizer slots of its partitions, gather
// and update. Knows nothing of gRPC, of other shards, or of who is asking.
//
// Threads: the engine works on those of a CpuPool. Rows of a partition are changed by one thread at
// a time, in the order in which work was submitted; neighbouring reads share a partition,
// everything else runs in parallel. All public methods may be called from any thread and do not
// block on other requests' work; callbacks run on a pool thread and must be short.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "base/buffers.h"
#include "base/thread_pools.h"
#include "preprocess/batch/csr.h"
#include "shard/batch/batch.h"
#include "shard/gather/pooling.h"
#include "shard/snapshot/snapshot.h"
#include "shard/store/model.h"
#include "shard/update/update.h"

namespace emberd::shard {

// What one partition holds, and has done since the start.
struct PartitionStatistics {
  int64_t table_bytes = 0;
  int64_t rows_gathered = 0;
  int64_t rows_updated = 0;
};
struct EngineStatistics {
  int models = 0;
  int64_t table_bytes = 0;  // reserved for weights and slots; what models share counts once
  int64_t rows_gathered = 0;
  int64_t rows_updated = 0;
  int queued = 0;  // pieces of work that could run but wait for a thread
  // As many as the models have on this shard; none without a model.
  std::vector<PartitionStatistics> partitions;
};

class Engine {
 public:
  static absl::StatusOr<std::unique_ptr<Engine>> Create(EngineOptions options);

  // Reserves and initialises. RESOURCE_EXHAUSTED names the bytes needed and the budget.
  // ALREADY_EXISTS if the id is known. If other models have a stack of the same resource
  // (StackSpec), takes that: ALREADY_EXISTS, too, if it differs; UNAVAILABLE while a model that
  // MakeModel has made is to bring its rows.
  absl::Status CreateModel(const ModelSpec& spec);
  absl::Status DropModel(uint64_t model_id);
  // The same for callers that must not wait: who lets go of the result last gives its memory back.
  absl::StatusOr<std::shared_ptr<Model>> TakeModel(uint64_t model_id);

  // DATA_LOSS, with the reason: the rows of the model were evicted and cannot be read any more.
  absl::Status DamageOf(uint64_t model_id) const;

  // A model whose rows come from elsewhere, as by StackStore::LoadWeights: it has its memory, but
  // nobody knows of it before AddModel, which gives the rows initial values that CreateModel would.
  // `alone`: FAILED_PRECONDITION if other models have a resource of it, whose rows would change.
  absl::StatusOr<std::shared_ptr<Model>> MakeModel(const ModelSpec& spec, bool alone = true);
  absl::Status AddModel(std::shared_ptr<Model> model);

  // For a recovery: changes that are handed over from now on are of this epoch.
  void SetEpoch(uint64_t epoch) { epoch_ = epoch; }

  // One snapshot of all these models, whose rows it holds. ABORTED while another snapshot has some
  // of these rows. FAILED_PRECONDITION: rows that are shared, and only what has changed of them.
  absl::StatusOr<std::shared_ptr<Snapshot>> MakeSnapshot(absl::Span<const uint64_t> model_ids,
                                                         const SnapshotOptions& options);
  // Fixes the rows as all work submitted before makes them.
  void StartSnapshot(Snapshot& snapshot);
  // Call it when the snapshot has been read, or is given up, started or not. `kept`: the next one
  // may be of what has changed since this one.
  void EndSnapshot(const std::shared_ptr<Snapshot>& snapshot, bool kept);

  // Checks `stacks` (from the wire: trust nothing) and arranges them. `owner` keeps their memory
  // alive and is held by the batch only as long as it is needed. `places`: what Gather will be
  // given; they are checked too.
  // `activation_dtype`: to what activations will be rounded. `for_update`: whether entries are put
  // in order for an update now, which takes memory (StackEntries.touches); if not, the update does
  // it.
  absl::StatusOr<std::shared_ptr<const Batch>> PrepareBatch(
      uint64_t model_id, std::vector<preprocess::StackBatchView> stacks,
      std::shared_ptr<const void> owner, const GatherPlaces& places = {},
      v1::DataType activation_dtype = v1::FLOAT32, bool for_update = true);

  // A batch that was logged and is to be applied again: entries as PrepareBatch has arranged them,
  // with their padding. Checks every number; nothing can be gathered with it. INVALID_ARGUMENT
  // names what does not fit.
  absl::StatusOr<std::shared_ptr<const Batch>> RestoreBatch(uint64_t model_id,
                                                            std::vector<StackEntries> stacks);

  // For every sample s and partition p: the sum over the entries of (s, p), in ascending local row,
  // of gain * row, starting from +0; then over the shard's partitions by a balanced binary tree in
  // partition order. Or the rows themselves: StackSpec.result_mode chooses, and AUTO prefers sums
  // that have `places`, which are those of PrepareBatch. Rows that are float32, of a stack with
  // single_rows, are rounded to bfloat16 if activations will be: that gives the same bits.
  using GatherCallback = std::function<void(absl::StatusOr<GatherOutput>)>;
  void Gather(std::shared_ptr<const Batch> batch, GatherPlaces places, GatherCallback done);

  // Bytes that a gather of the batch returns, at most.
  int64_t GatherBytes(const Batch& batch, const GatherPlaces& places = {}) const;

  // For every row of the batch, once: g = sum of gain * gradient[sample] in canonical sample order,
  // then the optimizer's update. With several ranks there is one update per row that any of them
  // touches, and the tables get the bits that a single rank would give them of the concatenated
  // batch: for each feature the samples of rank 0, then those of rank 1, and so on. A rank may lack
  // a stack; one that gives no gradients of a stack gives zeros.
  //
  // A step that is skipped changes nothing at all: no row, no slot, and none of the counts behind
  // stochastic rounding.
  //
  // `update` is complete. NOT_FOUND: its model was dropped before the call. Returns before `done`
  // runs.
  using ApplyCallback = std::function<void(absl::StatusOr<ApplyResult>)>;
  void Apply(StagedUpdate update, ApplyCallback done);

  // Rows in the order asked for, to values[rows * columns]. Each row is read as a whole.
  using DoneCallback = std::function<void(absl::Status)>;
  void ReadRows(const RowSelection& rows, absl::Span<float> values, DoneCallback done);

  // Rows that are to be written, from values[rows * columns], each as a whole. Staging checks
  // everything; `owner` keeps the values alive. NOT_FOUND, OUT_OF_RANGE or INVALID_ARGUMENT names
  // what does not fit.
  struct StagedAssign;
  absl::StatusOr<std::shared_ptr<const StagedAssign>> StageAssign(
      const RowSelection& rows, absl::Span<const float> values, std::shared_ptr<const void> owner);
  // NOT_FOUND: the model was dropped.
  static absl::Status Check(const StagedAssign& assign);
  // NOT_FOUND: the model was dropped before the call.
  void Assign(std::shared_ptr<const StagedAssign> assign, DoneCallback done);

  // Memory of rows that are touched for the first time: the bytes that the model can still take at
  // most, and those of them that a batch, or a selection, will take. 0 for a model that is not
  // known, and for what Gather or ReadRows will refuse.
  int64_t UntouchedBytes(uint64_t model_id) const;
  int64_t BytesToTouch(const Batch& batch) const;
  int64_t BytesToTouch(const RowSelection& rows) const;

  // Memory for the batch, an equal part of it on each SparseCore, for as long as somebody has the
  // result; null: models are not evicted. Errors: those of Model::Hold and MemoryManager::Keep.
  absl::StatusOr<std::shared_ptr<const void>> RoomFor(const Batch& batch) const;
  // Null: models are not evicted.
  MemoryManager* memory() const { return evicting_; }

  EngineStatistics Statistics() const;
  // At most `count` rows of every table, by model and table.
  std::vector<HotTable> HotRows(int count) const;

 private:
  struct GatherWork;

  explicit Engine(const EngineOptions& options);
  absl::StatusOr<std::shared_ptr<Model>> FindModel(uint64_t model_id) const;
  // Add a stack's result to the work's output, to be filled by the job.
  Job SumJob(const std::shared_ptr<GatherWork>& work, const StackEntries& entries);
  Job CopyJob(const std::shared_ptr<GatherWork>& work, const StackEntries& entries);
  Job UpdateJob(std::shared_ptr<UpdateWork> work, const StackUpdate& stack, int k);
  // Runs on a thread of the pool, without strands.
  void Later(std::function<void()> done);

  const EngineOptions options_;  // with a memory
  MemoryManager* const evicting_;
  const std::shared_ptr<SharedStacks> shared_;
  BufferPool pool_;

  mutable absl::Mutex mutex_;
  absl::flat_hash_map<uint64_t, std::shared_ptr<Model>> models_ ABSL_GUARDED_BY(mutex_);

  std::atomic<uint64_t> epoch_ = ~uint64_t{0};

  // Held while an update takes its place and its strands, so that both have one order.
  absl::Mutex order_mutex_;
  // Stacks of which a snapshot was made and not ended.
  absl::flat_hash_set<const StackStore*> in_snapshots_ ABSL_GUARDED_BY(order_mutex_);

  struct PartitionCounts {
    std::atomic<int64_t> rows_gathered{0};
    std::atomic<int64_t> rows_updated{0};
  };
  static constexpr int kMaxPartitions = 64;
  PartitionCounts partitions_[kMaxPartitions];

  Executor executor_;  // last: its destructor waits for work that uses the rest
};

}  // namespace emberd::shard
