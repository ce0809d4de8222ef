#include "client/demo/embeddings.h"

#include <openssl/evp.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace emberd::demo {

client::ModelDescription DescribeModel(const DatasetInfo& info, const Hyperparameters& parameters,
                                       int64_t batch_size) {
  client::ModelDescription model;
  model.name = info.name;
  model.seed = parameters.seed;
  model.optimizer = {"adagrad",
                     {{"learning_rate", parameters.embedding_learning_rate},
                      {"initial_accumulator", parameters.embedding_initial_accumulator}}};
  const float range = parameters.embedding_initial_range;
  for (const FeatureInfo& feature : info.features) {
    model.tables.push_back({.name = feature.name,
                            .vocabulary_size = feature.vocabulary_size,
                            .embedding_dim = parameters.embedding_dim,
                            .combiner = feature.combiner,
                            .initializer = client::Initializer::Uniform(-range, range),
                            .max_ids_per_partition = parameters.max_ids_per_partition});
    model.features.push_back(
        {.name = feature.name, .table = feature.name, .batch_size = batch_size});
  }
  return model;
}

absl::StatusOr<std::unique_ptr<Embeddings>> Embeddings::Connect(
    const std::vector<std::string>& coordinators, const client::ModelDescription& model) {
  client::ClientOptions options;
  options.addresses = coordinators;
  options.max_attempts = 1;
  absl::StatusOr<std::unique_ptr<client::Client>> client = client::Client::Connect(options);
  if (!client.ok()) return client.status();
  std::unique_ptr<Embeddings> embeddings(new Embeddings);
  embeddings->client_ = std::move(*client);
  embeddings->description_ = model;
  if (auto s = embeddings->Declare(); !s.ok()) return s;
  return embeddings;
}

absl::Status Embeddings::Declare() {
  absl::StatusOr<client::Model> model = client_->DeclareModel(description_);
  if (!model.ok()) return model.status();
  model_ = std::move(*model);
  return absl::OkStatus();
}

std::vector<client::FeatureIds> Embeddings::Ids(const Batch& batch) const {
  std::vector<client::FeatureIds> request;
  for (size_t f = 0; f < batch.features.size(); ++f) {
    const FeatureColumn& column = batch.features[f];
    client::FeatureIds& feature = request.emplace_back();
    feature.feature = model_.features[f].name;
    if (column.row_splits.empty()) {
      feature.ids = client::DenseIds{absl::MakeConstSpan(column.ids)};
    } else {
      feature.ids = client::RaggedIds{absl::MakeConstSpan(column.row_splits),
                                      absl::MakeConstSpan(column.ids)};
    }
  }
  return request;
}

absl::StatusOr<client::LookupResult> Embeddings::Lookup(const Batch& batch) {
  return client_->Lookup(model_, Ids(batch), {.inference = true});
}

absl::Status Embeddings::SendLookup(client::TrainStream* stream, int64_t step, const Batch& batch) {
  return stream->SendLookup(step, Ids(batch));
}

absl::Status Embeddings::SendUpdate(client::TrainStream* stream, int64_t step, int64_t samples,
                                    const std::shared_ptr<const DenseStep>& gradients) {
  std::vector<client::FeatureGradient> request;
  for (size_t f = 0; gradients != nullptr && f < gradients->embedding_gradients.size(); ++f) {
    request.push_back({model_.features[f].name, gradients->embedding_gradients[f], samples});
  }
  return stream->SendUpdate(step, request, {.memory = gradients});
}

absl::Status Embeddings::Export(const std::string& table, const client::Client::RowSink& sink) {
  return client_->ExportTable(model_, table, sink);
}

absl::StatusOr<std::string> TableChecksum(Embeddings* embeddings) {
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> hash(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  bool ok = hash != nullptr && EVP_DigestInit_ex(hash.get(), EVP_sha256(), nullptr) == 1;
  const auto add = [&](int64_t, absl::Span<const float> values, int64_t) {
    ok = ok && EVP_DigestUpdate(hash.get(), values.data(), values.size() * sizeof(float)) == 1;
    return ok ? absl::OkStatus() : absl::InternalError("SHA-256 failed");
  };
  for (const client::TableInfo& table : embeddings->model().tables) {
    if (auto s = embeddings->Export(table.name, add); !s.ok()) return s;
  }
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  ok = ok && EVP_DigestFinal_ex(hash.get(), digest, &size) == 1;
  if (!ok) return absl::InternalError("SHA-256 failed");
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest), size});
}

}  // namespace emberd::demo
