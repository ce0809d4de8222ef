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
#include "client/demo/hyperparameters.h"

namespace emberd::demo {

// What the demo declares for a dataset.
client::ModelDescription DescribeModel(const DatasetInfo& info, const Hyperparameters& parameters,
                                       int64_t batch_size);

// Thread-safe as far as client::Client is, apart from Declare.
class Embeddings {
 public:
  // Connects to a coordinator ("host:port") and declares the model. A call that fails is not
  // repeated behind the caller's back: a trainer should say that the cluster has a problem.
  static absl::StatusOr<std::unique_ptr<Embeddings>> Connect(const std::string& coordinator,
                                                             const client::ModelDescription& model);

  // Declares the model again: after a shard has come back empty.
  absl::Status Declare();

  // Activations of all features of the batch, in the order of DatasetInfo.
  absl::StatusOr<client::LookupResult> Lookup(const Batch& batch, bool inference);
  // Gradients in the order of DatasetInfo, each row-major [batch size, embedding_dim]. The number
  // of rows updated.
  absl::StatusOr<int64_t> Apply(const client::LookupResult& lookup, int64_t samples,
                                absl::Span<const std::vector<float>> gradients);
  // Calls `sink` with the rows of a table, run after run.
  absl::Status Export(const std::string& table, const client::Client::RowSink& sink);

  absl::StatusOr<client::ClusterStatus> Status() { return client_->GetStatus(); }
  const client::Model& model() const { return model_; }

 private:
  Embeddings() = default;

  std::unique_ptr<client::Client> client_;
  client::ModelDescription description_;
  client::Model model_;
};

// SHA-256, as hex digits, over the float32 values of all tables: in the order of the model's
// tables, each row by row in the order of ids. Optimizer slots are not part of it.
absl::StatusOr<std::string> TableChecksum(Embeddings* embeddings);

}  // namespace emberd::demo
