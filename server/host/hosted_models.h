// The models that one shard holds: their configs, what its engine must know of them, and where
// their work is counted.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "emberd/internal/v1/log.pb.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/v1/model.pb.h"
#include "preprocess/plan/plan.h"
#include "server/host/log/shard_log.h"
#include "server/ops/metrics.h"
#include "shard/engine.h"
#include "shard/store/stack_store.h"

namespace emberd::host {

// From a plan of the whole cluster to what one shard's engine must know. `config` is complete and
// `plan` was made from it.
shard::ModelSpec ModelSpecFromPlan(uint64_t model_id, const v1::ModelConfig& config,
                                   const preprocess::Plan& plan, int shard_index);

// Where a shard stands in its cluster.
struct ShardPlace {
  int shards = 1;
  int sparsecores_per_shard = 1;
  int index = 0;
};

// Thread-safe. What the calls mean and their errors: shard_service.proto. Create and Drop take
// turns and may take long; nothing else waits for them.
//
// A model that is trained has one history here. One that serves checkpoints may have two, of which
// the engine knows each by its history.
class HostedModels {
 public:
  // Gives up whatever else is kept of a model that goes, under the lock of the sequencer, so that
  // the log says it at the same moment. What it returns runs when the lock is free. `rows_stay`:
  // another model shares some of its rows.
  using Forget = std::function<std::function<void()>(uint64_t model_id, bool rows_stay)>;
  // `engine`, `metrics`, `log` and `order` must outlive it.
  HostedModels(const ShardPlace& place, shard::Engine* engine, ops::Metrics* metrics, ShardLog* log,
               Sequencer* order, Forget forget)
      : place_(place),
        engine_(engine),
        metrics_(metrics),
        log_(log),
        order_(order),
        forget_(std::move(forget)) {}

  absl::StatusOr<internal::v1::CreateModelResponse> Create(
      internal::v1::CreateModelRequest request);
  absl::Status Serve(const internal::v1::ServeModelRequest& request);
  absl::StatusOr<internal::v1::FindModelResponse> Find(
      const internal::v1::FindModelRequest& request) const;
  internal::v1::ListModelsResponse List() const;
  // Here and in the engine.
  absl::Status Drop(const internal::v1::DropModelRequest& request);

  // Takes the place of what the request replaces, as Create does, for rows that come from a
  // checkpoint. Until EndRestore nobody else's rows are here under this name. Returns what the
  // engine must know.
  absl::StatusOr<shard::ModelSpec> BeginRestore(const internal::v1::CreateModelRequest& request);
  // The rows are here. `checkpoint_id`: the one that they are equal to; 0: to none. ABORTED: they
  // were dropped or replaced meanwhile. `made` says which one it is for the log. In the same
  // moment, under the lock of the sequencer, `rest` puts all else that comes from the checkpoint
  // into its place; what it returns runs when the lock is free.
  using Rest = std::function<std::function<void()>()>;
  absl::Status EndRestore(const internal::v1::LogModelMade& made,
                          std::shared_ptr<shard::Model> model, int64_t changes,
                          uint64_t checkpoint_id, const Rest& rest);
  // Gives up rows that nobody was told to serve.
  void Abandon(uint64_t model_id, uint64_t history);
  // The same for restored rows of shard 0, when all of its log was read: it is the first that is
  // told to serve, so no shard was, and whoever restored them does not go on after its restart.
  void AbandonRestored();

  // An update or assignment was made.
  void AddChange(uint64_t model_id);
  struct Facts {
    uint64_t history = 0;  // 0: it is not here
    int64_t changes = 0;
    // The newest checkpoint since which it is known what has changed; 0: there is none.
    uint64_t checkpoint_id = 0;
    ops::ShardModelMetrics* metrics = nullptr;  // null: it is not here
  };
  Facts FactsOf(uint64_t model_id) const;
  // `segment`: of the log, which begins with the rows of the checkpoints that were saved.
  // NOT_FOUND: none of these rows is here any more. Another error: the log goes on from an older
  // one.
  absl::Status SetCheckpoints(absl::Span<const internal::v1::BeginSaveRequest> saves,
                              uint64_t segment);
  // ABORTED if the changes of another model are in rows of these: with a log, they are saved
  // together.
  absl::Status CheckHolders(absl::Span<const uint64_t> model_ids) const;

  // For the log, whose next segment this is: all that is known here. Nobody stays in the log.
  void Describe(uint64_t segment, internal::v1::LogState* state) const;
  // The segment has begun: what has not changed since another one counts from this.
  void SegmentBegun(uint64_t segment);
  // The oldest segment that some model's rows need; nothing: none needs any.
  std::optional<uint64_t> OldestSegment() const;
  // Keeps a model in the memory of its SparseCores, or no longer, and so that the log knows it.
  // Errors are those of MemoryManager::SetPinned, and of the log; after one, it is as it was. The
  // engine must have a memory manager.
  absl::StatusOr<v1::ShardMemoryChange> SetPinned(const std::string& name, bool pinned);
  // For the log, when all of it was read: pins what it says. What no longer fits is not pinned any
  // more, with a warning.
  void PinAgain();

  // Takes a model that a log has. `model`: with the rows of a checkpoint after so many changes;
  // null: its rows are initial. `tracked`: the checkpoint since which it is known what has changed;
  // 0: none.
  absl::Status Remember(const internal::v1::LogModel& from, std::shared_ptr<shard::Model> model,
                        int64_t changes, uint64_t tracked);
  absl::StatusOr<shard::ModelSpec> SpecOf(const internal::v1::CreateModelRequest& request) const;
  // A record of a model that is served, pinned or renewed.
  void Replay(const internal::v1::LogRecord& record);
  // A model goes, here and in the engine, as Drop found it or the log says.
  absl::Status Remove(uint64_t engine_id);
  void RememberDroppedHistory(uint64_t history);

  struct Rows {
    uint64_t engine_id = 0;  // what the engine knows the model by
    bool read_only = false;
    ops::ShardModelMetrics* metrics = nullptr;
  };
  // DATA_LOSS unless the model is served with rows of this history. UNAVAILABLE: they have come
  // back, and no coordinator has compared them with those of the other shards.
  // `unserved`: or is not served yet, for the client that fills it: it is compared when it is.
  absl::StatusOr<Rows> FindRows(uint64_t model_id, uint64_t history, bool unserved = false) const;
  absl::Status Check(uint64_t model_id, uint64_t history) const {
    return FindRows(model_id, history).status();
  }

 private:
  struct Model {
    bool serving = false;
    bool restored = false;  // not of initial rows
    bool loading = false;   // BeginRestore, and not yet EndRestore
    bool returned = false;  // from the log, and not compared yet
    int64_t changes = 0;    // under this history
    uint64_t checkpoint_id = 0;
    // How the log makes it: the request, with the history of now, and the rows that its changes
    // follow.
    internal::v1::CreateModelRequest create;
    internal::v1::LogRows rows;
    ops::ShardModelMetrics* metrics = nullptr;

    uint64_t model_id() const { return create.model_id(); }
    uint64_t history() const { return create.history(); }
    const v1::ModelConfig& config() const { return create.config(); }
    // Of a model that is trained: empty.
    const internal::v1::ServedRows& serves() const { return create.serves(); }
    bool is_trained() const { return serves().model().empty(); }
  };
  // What the request finds in its place.
  struct Place {
    bool done = false;      // it had been carried out before
    uint64_t occupant = 0;  // the model that has to go first; 0: there is none
  };

  absl::Status CheckPlace(const internal::v1::CreateModelRequest& request) const;
  // Who else has shared tables of the model (CreateModelResponse), if it may have them.
  absl::StatusOr<std::string> CheckShared(const internal::v1::CreateModelRequest& request,
                                          bool initial_rows) const ABSL_LOCKS_EXCLUDED(mutex_);
  // The oldest segment that is needed for a model whose own rows begin in `segment`: rows that it
  // shares may follow from an older checkpoint of another model.
  uint64_t OldestOfShared(const v1::ModelConfig& config, uint64_t segment) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The plan of the model that the request is about.
  absl::StatusOr<preprocess::Plan> CheckRequest(
      const internal::v1::CreateModelRequest& request) const;
  Model MakeEntry(const internal::v1::CreateModelRequest& request,
                  const preprocess::Plan& plan) const;
  // Null if it is not here.
  const Model* FindEntry(uint64_t model_id, uint64_t history) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // For rows that are only read.
  absl::Status FindPlaceBeside(const internal::v1::CreateModelRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Place> FindPlace(const internal::v1::CreateModelRequest& request,
                                  bool initial_rows);
  absl::Status RecordRestore(const internal::v1::LogModelMade& made, int64_t changes,
                             uint64_t checkpoint_id, const Rest& rest,
                             std::function<void()>* after);
  // Pins what was made to be pinned, and is here now.
  void PinIfCreatedSo(uint64_t engine_id);
  absl::Status RecordPinned(const std::string& name, bool pinned);
  absl::Status SetLimits(const internal::v1::ModelLimits& limits, Model* model)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether no record since the segment of its rows has changed them, so that they may as well
  // count from a later one.
  bool MayMove(uint64_t model_id, const Model& model) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RememberDropped(uint64_t history) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ShardPlace place_;
  shard::Engine* const engine_;
  ops::Metrics* const metrics_;
  ShardLog* const log_;
  Sequencer* const order_;
  const Forget forget_;
  absl::Mutex changing_ ABSL_ACQUIRED_BEFORE(mutex_);  // held while tables are filled
  mutable absl::Mutex mutex_;                          // never held for long
  absl::flat_hash_map<uint64_t, Model> models_ ABSL_GUARDED_BY(mutex_);  // by engine id
  std::deque<uint64_t> dropped_ ABSL_GUARDED_BY(mutex_);  // histories, the newest last
};

}  // namespace emberd::host
