// The C++ client of emberd. A step of training:
//
//   ClientOptions options;
//   options.addresses = {"127.0.0.1:7400"};
//   absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(options);
//   absl::StatusOr<Model> model = (*client)->DeclareModelFile("model.textproto");
//   for (...) {
//     absl::StatusOr<LookupResult> found =
//         (*client)->Lookup(*model, {{"user", DenseIds{user_ids}}});
//     ... forward and backward on found->activations[0].values ...
//     (*client)->ApplyGradients(*model, found->batch, {{"user", gradient, samples}});
//   }
//
// Errors are what the server said, code and message, or INVALID_ARGUMENT for what cannot be sent at
// all. UNAVAILABLE is retried with backoff within the deadline; but what drops, resets or deletes
// is sent once: after UNAVAILABLE it may have been done. An answer that does not fit its request is
// INTERNAL.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/batch.h"
#include "client/cpp/checkpoints.h"
#include "client/cpp/model.h"
#include "client/cpp/options.h"
#include "client/cpp/programs.h"
#include "client/cpp/status.h"
#include "client/cpp/train_stream.h"

namespace emberd::client {

// Thread-safe. Every call blocks until its answer, its deadline or CancelCalls.
class Client {
 public:
  // Tries the addresses in turn, with growing patience, until one accepts a connection; UNAVAILABLE
  // after connect_timeout.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(ClientOptions options);
  // No call may be in progress, and no stream be left.
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Makes the tables of a model or finds them. `config` is a ModelConfig as text proto or JSON,
  // checked here before it is sent. ALREADY_EXISTS if another model of this name is there.
  absl::StatusOr<Model> DeclareModel(const std::string& config, const DeclareOptions& options = {});
  absl::StatusOr<Model> DeclareModel(const ModelDescription& description,
                                     const DeclareOptions& options = {});
  absl::StatusOr<Model> DeclareModelFile(const std::string& path,
                                         const DeclareOptions& options = {});
  // Finds a declared model. NOT_FOUND if it is not declared.
  absl::StatusOr<Model> DescribeModel(const std::string& name);

  // `features` holds every feature of the model once, in any order.
  absl::StatusOr<LookupResult> Lookup(const Model& model, absl::Span<const FeatureIds> features,
                                      const LookupOptions& options = {});
  // Updates every row that the batch touched and gives the batch back. A feature without gradients
  // has zero gradients.
  absl::StatusOr<ApplyResult> ApplyGradients(const Model& model, const BatchHandle& batch,
                                             absl::Span<const FeatureGradient> gradients,
                                             const ApplyOptions& options = {});
  // Gives back a batch that will not be applied.
  absl::Status ReleaseBatch(const Model& model, const BatchHandle& batch);

  // Joins a group of trainers, or begins one of a single trainer, on one coordinator; blocks until
  // all ranks are there, DEADLINE_EXCEEDED after the step_timeout. Not tried again: see
  // train_stream.h. The stream must go before the client.
  absl::StatusOr<std::unique_ptr<TrainStream>> Train(const Model& model,
                                                     const TrainOptions& options);

  // Rows of the weights or of one optimizer slot, in the order of `ids`, which may repeat.
  // OUT_OF_RANGE for an id beyond the table, NOT_FOUND for an unknown table, INVALID_ARGUMENT for
  // an unknown slot, RESOURCE_EXHAUSTED for more rows than one message holds.
  absl::StatusOr<RowValues> ReadRows(const Model& model, const std::string& table,
                                     absl::Span<const int64_t> ids, const std::string& slot = "");
  // Overwrites rows, on all shards or on none; `values` is row-major [ids, dim] in the order of
  // `ids`, where dim is embedding_dim, or 1 for a slot with one value per row. True: it had been
  // done before (see AssignOptions::sequence). Errors as of ReadRows; INVALID_ARGUMENT also for
  // repeated ids, another number of values and values that are not finite, FAILED_PRECONDITION if
  // the model serves a checkpoint.
  absl::StatusOr<bool> AssignRows(const Model& model, const std::string& table,
                                  absl::Span<const int64_t> ids, absl::Span<const float> values,
                                  const AssignOptions& options = {});
  // Calls `sink` with run after run of rows, in id order, each row once, `values` being [rows,
  // dim]; dim is 1 for a slot with one value per row. An error of `sink` ends the export and is
  // returned. OUT_OF_RANGE for rows beyond the table, NOT_FOUND and INVALID_ARGUMENT as above,
  // ABORTED if the model is reset or restored meanwhile.
  using RowSink =
      std::function<absl::Status(int64_t first_row, absl::Span<const float> values, int64_t dim)>;
  absl::Status ExportTable(const Model& model, const std::string& table, const RowSink& sink,
                           const ExportOptions& options = {});

  // Saves the rows, slots and groups of one moment while training goes on. ALREADY_EXISTS: there is
  // a checkpoint of this name. Not retried once it has begun; after an error there is a complete
  // checkpoint, or none.
  absl::StatusOr<SavedCheckpoint> SaveCheckpoint(const std::string& model,
                                                 const SaveOptions& options = {});
  // Gives a model, declared or not, the rows and groups of a checkpoint; DescribeModel finds it
  // then. Earlier batches and streams end with ABORTED. DATA_LOSS names a damaged file; then
  // nothing has changed.
  absl::StatusOr<CheckpointInfo> RestoreCheckpoint(const std::string& model,
                                                   const RestoreOptions& options = {});
  // Has a model serve the weights of a checkpoint, for lookups alone: LookupOptions::inference.
  // DescribeModel finds it then. What was served under its name is replaced once all shards have
  // the new rows: no lookup fails. ALREADY_EXISTS: a model of this name is trained here.
  absl::StatusOr<CheckpointInfo> ServeCheckpoint(const std::string& model,
                                                 const ServeOptions& options = {});
  // Of one model; empty: of all.
  absl::StatusOr<CheckpointList> ListCheckpoints(const std::string& model = "");
  // Returns the number of bytes freed. FAILED_PRECONDITION: another checkpoint builds on it.
  absl::StatusOr<int64_t> DeleteCheckpoint(const std::string& model, const std::string& name);

  absl::StatusOr<ClusterStatus> GetStatus();
  // Removes a model and its rows. False: there was none of this name.
  absl::StatusOr<bool> DropModel(const std::string& name);
  // Discards all rows of a model, which gets initial rows again; ends DATA_LOSS. NOT_FOUND if it is
  // not declared.
  absl::Status ResetModel(const std::string& name);

  // Forgets a group of trainers whose run is over: the next run under its name begins at its first
  // step. False: no shard knows it. FAILED_PRECONDITION: some of its ranks are active. NOT_FOUND if
  // the model is not declared.
  absl::StatusOr<bool> DropGroup(const std::string& model, const std::string& group);

  // Compiled programs, and batches and results that stay on a coordinator; and any method of
  // AdminService, by its name.
  Programs& programs() { return *programs_; }

  // A number that no other update of this client has, for ApplyOptions and AssignOptions.
  uint64_t NextSequence() { return next_sequence_++; }
  // Ends all calls and streams in progress, on all threads, with CANCELLED. Later calls are not
  // affected.
  void CancelCalls();
  uint64_t cancellations() const;  // how often it was called

  const std::string& client_id() const { return options_.client_id; }

 private:
  Client(ClientOptions options, std::unique_ptr<Transport> transport);
  // INVALID_ARGUMENT for a handle that no coordinator of this client gave.
  absl::Status CheckBatch(const BatchHandle& batch) const;

  const ClientOptions options_;
  const std::unique_ptr<Transport> transport_;
  std::atomic<uint64_t> next_sequence_ = 1;
  const std::shared_ptr<Programs> programs_;
};

}  // namespace emberd::client
