// The demo's embeddings in emberd, through the C++ client: one table per feature, and a trainer's
// steps on them.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "tests/bench/demo/dataset.h"
#include "tests/bench/demo/dense_model.h"
#include "tests/bench/demo/experiment.h"

namespace emberd::demo {

// What the demo declares for a dataset.
client::ModelDescription DescribeModel(const DatasetInfo& info, const Hyperparameters& parameters,
                                       int64_t batch_size);

// Thread-safe as far as client::Client is, apart from Declare.
class Embeddings {
 public:
  // Connects to the first coordinator ("host:port") that answers and declares the model. A call
  // that fails is not repeated behind the caller's back: a trainer should say that the cluster has
  // a problem.
  static absl::StatusOr<std::unique_ptr<Embeddings>> Connect(
      const std::vector<std::string>& coordinators, const client::ModelDescription& model);

  // Declares the model again: after a shard has come back empty.
  absl::Status Declare();

  // Activations of all features of the batch, in the order of DatasetInfo. For inference.
  absl::StatusOr<client::LookupResult> Lookup(const Batch& batch);

  // Joins a group of trainers.
  absl::StatusOr<std::unique_ptr<client::TrainStream>> Train(const client::TrainOptions& options) {
    return client_->Train(model_, options);
  }
  absl::Status SendLookup(client::TrainStream* stream, int64_t step, const Batch& batch);
  // Null: all gradients are zero. `checkpoint`: see client::UpdateOptions.
  absl::Status SendUpdate(client::TrainStream* stream, int64_t step, int64_t samples,
                          const std::shared_ptr<const DenseStep>& gradients,
                          const std::string& checkpoint);
  // Calls `sink` with the rows of a table, run after run.
  absl::Status Export(const std::string& table, const client::Client::RowSink& sink);

  // Names of the model's checkpoints, newest first.
  absl::StatusOr<std::vector<std::string>> Checkpoints();
  // Gives the model the rows and the group of a checkpoint.
  absl::Status Restore(const std::string& checkpoint);

  absl::StatusOr<client::ClusterStatus> Status() { return client_->GetStatus(); }
  const client::Model& model() const { return model_; }
  // A name that nobody else has.
  const std::string& client_id() const { return client_->client_id(); }

 private:
  Embeddings() = default;
  std::vector<client::FeatureIds> Ids(const Batch& batch) const;

  std::unique_ptr<client::Client> client_;
  client::ModelDescription description_;
  client::Model model_;
};

// SHA-256, as hex digits, over the float32 values of all tables: in the order of the model's
// tables, each row by row in the order of ids. Optimizer slots are not part of it.
absl::StatusOr<std::string> TableChecksum(Embeddings* embeddings);

// A trainer's steps on a Train stream, over the end of streams: what has not been applied yet is
// kept, and sent again on the next stream. Not thread-safe.
class Steps {
 public:
  Steps(Embeddings* embeddings, client::TrainOptions options)
      : embeddings_(embeddings), options_(std::move(options)) {}

  // The update of a step, to be sent; without gradients they are all zero. With the name of a
  // checkpoint, one is asked for that holds the steps up to this one.
  void Add(int64_t step, std::shared_ptr<const Batch> batch,
           std::shared_ptr<const DenseStep> gradients, std::string checkpoint = "");

  // Joins the group and sends again what has not been applied. `next`: the first step whose update
  // has not been added. `oldest`: the first that some rank may not know to be applied, the same for
  // all ranks; a group whose model was reset goes on from there. OUT_OF_RANGE if the group stands
  // at a step that this trainer cannot go on from.
  absl::Status Join(int64_t next, int64_t oldest);
  void Leave() { stream_.reset(); }
  // Of the group, as far as the generations of its ranks depend on each other; 0 otherwise.
  uint64_t generation() const;
  bool joined() const { return stream_ != nullptr; }

  // Sends the lookup of a step, unless that has been done on this stream.
  absl::Status SendLookup(int64_t step, const Batch& batch);
  absl::StatusOr<client::TrainLookupResult> ReceiveLookup();
  // Sends the updates that have been added.
  absl::Status SendUpdates();
  // Waits until no more than `most` updates are not known to be applied. The results of those that
  // have come meanwhile.
  absl::StatusOr<std::vector<client::TrainUpdateResult>> AwaitUpdates(size_t most);
  // No more lookups and updates: lets a pipelined group apply the last update.
  absl::Status Finish() { return stream_->Finish(); }

 private:
  struct Pending {
    int64_t step;
    std::shared_ptr<const Batch> batch;
    std::shared_ptr<const DenseStep> gradients;
    std::string checkpoint;
  };

  void PopApplied();

  Embeddings* embeddings_;
  client::TrainOptions options_;
  std::deque<Pending> pending_;  // not known to be applied
  std::deque<Pending> applied_;  // the last ones that are, kept for a reset
  std::unique_ptr<client::TrainStream> stream_;
  int64_t base_ = 0;  // the trainer's step that is step 0 of the group: more after a reset
  // Of this stream.
  int64_t next_lookup_ = 0;
  int64_t next_update_ = 0;
  int unwanted_lookups_ = 0;  // of steps that were sent again
};

}  // namespace emberd::demo
