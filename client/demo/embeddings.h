// The demo's embeddings in emberd: one table per feature, through the C++ client.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "client/demo/dataset.h"
#include "client/demo/dense_model.h"
#include "client/demo/hyperparameters.h"

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
  // Null: all gradients are zero.
  absl::Status SendUpdate(client::TrainStream* stream, int64_t step, int64_t samples,
                          const std::shared_ptr<const DenseStep>& gradients);
  // Calls `sink` with the rows of a table, run after run.
  absl::Status Export(const std::string& table, const client::Client::RowSink& sink);

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

}  // namespace emberd::demo
