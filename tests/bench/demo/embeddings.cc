
#include "tests/bench/demo/embeddings.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "base/status.h"

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
  ASSIGN_OR_RETURN(std::unique_ptr<client::Client> client, client::Client::Connect(options));
  std::unique_ptr<Embeddings> embeddings(new Embeddings);
  embeddings->client_ = std::move(client);
  embeddings->description_ = model;
  RETURN_IF_ERROR(embeddings->Declare());
  return embeddings;
}

absl::Status Embeddings::Declare() {
  ASSIGN_OR_RETURN(client::Model model, client_->DeclareModel(description_));
  model_ = std::move(model);
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
                                    const std::shared_ptr<const DenseStep>& gradients,
                                    const std::string& checkpoint) {
  std::vector<client::FeatureGradient> request;
  for (size_t f = 0; gradients != nullptr && f < gradients->embedding_gradients.size(); ++f) {
    request.push_back({model_.features[f].name, gradients->embedding_gradients[f], samples});
  }
  return stream->SendUpdate(step, request, {.memory = gradients, .checkpoint = checkpoint});
}

absl::StatusOr<std::vector<std::string>> Embeddings::Checkpoints() {
  ASSIGN_OR_RETURN(const client::CheckpointList list, client_->ListCheckpoints(model_.name));
  std::vector<std::string> names;
  for (const client::CheckpointInfo& checkpoint : list.checkpoints) {
    names.push_back(checkpoint.name);
  }
  return names;
}

absl::Status Embeddings::Restore(const std::string& checkpoint) {
  RETURN_IF_ERROR(client_->RestoreCheckpoint(model_.name, {.name = checkpoint}).status());
  return Declare();
}

absl::Status Embeddings::Export(const std::string& table, const client::Client::RowSink& sink) {
  return client_->ExportTable(model_, table, sink);
}

absl::StatusOr<std::string> TableChecksum(Embeddings* embeddings) {
  Sha256Stream hash;
  const auto add = [&hash](int64_t, absl::Span<const float> values, int64_t) {
    hash.Add({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)});
    return absl::OkStatus();
  };
  for (const client::TableInfo& table : embeddings->model().tables) {
    RETURN_IF_ERROR(embeddings->Export(table.name, add));
  }
  return hash.Hex();
}

void Steps::Add(int64_t step, std::shared_ptr<const Batch> batch,
                std::shared_ptr<const DenseStep> gradients, std::string checkpoint) {
  pending_.push_back({step, std::move(batch), std::move(gradients), std::move(checkpoint)});
}

void Steps::PopApplied() {
  constexpr size_t kRanksApart = 2;  // steps, in a pipelined group
  applied_.push_back(std::move(pending_.front()));
  pending_.pop_front();
  if (applied_.size() > kRanksApart) applied_.pop_front();
}

absl::Status Steps::Join(int64_t next, int64_t oldest) {
  stream_.reset();
  ASSIGN_OR_RETURN(std::unique_ptr<client::TrainStream> stream, embeddings_->Train(options_));
  int64_t first = stream->next_step() + base_;
  while (!pending_.empty() && pending_.front().step < first) PopApplied();
  const auto step_to_send = [&] { return pending_.empty() ? next : pending_.front().step; };
  int64_t expected = step_to_send();
  if (first < expected) {  // somebody has reset the model, and the group counts anew
    // One rank may know of a step that it was applied while another sends it again.
    for (; !applied_.empty() && applied_.back().step >= oldest; applied_.pop_back()) {
      pending_.push_front(std::move(applied_.back()));
    }
    expected = step_to_send();
    base_ += expected - first;
    first = expected;
  }
  if (first != expected) {
    return absl::OutOfRangeError(absl::StrCat("group \"", options_.group, "\" stands at step ",
                                              first, "; this trainer can go on from ", expected));
  }
  stream_ = std::move(stream);
  next_lookup_ = next_update_ = first;
  unwanted_lookups_ = static_cast<int>(pending_.size());
  for (const Pending& pending : pending_) {
    RETURN_IF_ERROR(SendLookup(pending.step, *pending.batch));
    RETURN_IF_ERROR(SendUpdates());
  }
  return absl::OkStatus();
}

uint64_t Steps::generation() const {
  const bool dependent = options_.consistency == client::Consistency::kSync;
  return dependent && joined() ? stream_->generation() : 0;
}

absl::Status Steps::SendLookup(int64_t step, const Batch& batch) {
  if (step < next_lookup_) return absl::OkStatus();
  RETURN_IF_ERROR(embeddings_->SendLookup(stream_.get(), step - base_, batch));
  next_lookup_ = step + 1;
  return absl::OkStatus();
}

absl::StatusOr<client::TrainLookupResult> Steps::ReceiveLookup() {
  for (; unwanted_lookups_ > 0; --unwanted_lookups_) {
    RETURN_IF_ERROR(stream_->ReceiveLookup().status());
  }
  return stream_->ReceiveLookup();
}

absl::Status Steps::SendUpdates() {
  for (const Pending& pending : pending_) {
    if (pending.step < next_update_ || pending.step >= next_lookup_) continue;
    const auto status =
        embeddings_->SendUpdate(stream_.get(), pending.step - base_, pending.batch->size,
                                pending.gradients, pending.checkpoint);
    if (!status.ok()) return status;
    next_update_ = pending.step + 1;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<client::TrainUpdateResult>> Steps::AwaitUpdates(size_t most) {
  std::vector<client::TrainUpdateResult> results;
  while (pending_.size() > most) {
    ASSIGN_OR_RETURN(client::TrainUpdateResult result, stream_->ReceiveUpdate());
    PopApplied();
    results.push_back(std::move(result));
  }
  return results;
}

}  // namespace emberd::demo
