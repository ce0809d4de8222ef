#include "tests/testing/training.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "base/sha256.h"
#include "base/testing/await.h"

namespace emberd::testing {
namespace {

// Uniform in [0, 1), from the bits of the generator alone: the standard distributions differ
// between libraries.
double Unit(std::mt19937_64& random) { return static_cast<double>(random() >> 11) * 0x1p-53; }

// Small ids are much more frequent.
int64_t SkewedId(std::mt19937_64& random, int64_t vocabulary) {
  const double u = Unit(random);
  return static_cast<int64_t>(u * u * u * static_cast<double>(vocabulary));
}

OwnedIds Ragged(std::mt19937_64& random, const std::string& feature, int64_t vocabulary,
                int64_t samples, bool weighted) {
  OwnedIds ids;
  ids.feature = feature;
  ids.splits.push_back(0);
  for (int64_t s = 0; s < samples; ++s) {
    const int64_t count = s % 5 == 3 ? 0 : static_cast<int64_t>(Unit(random) * 6);
    for (int64_t i = 0; i < count; ++i) {
      ids.wide.push_back(SkewedId(random, vocabulary));
      if (weighted) ids.weights.push_back(static_cast<float>(Unit(random) * 2 - 0.5));
    }
    ids.splits.push_back(static_cast<int64_t>(ids.wide.size()));
  }
  return ids;
}

OwnedIds Dense(std::mt19937_64& random, const std::string& feature, int64_t vocabulary,
               int64_t samples, int64_t ids_per_sample, bool narrow, bool weighted) {
  OwnedIds ids;
  ids.feature = feature;
  ids.ids_per_sample = ids_per_sample;
  for (int64_t i = 0; i < samples * ids_per_sample; ++i) {
    const int64_t id = SkewedId(random, vocabulary);
    if (narrow) ids.narrow.push_back(static_cast<int32_t>(id));
    if (!narrow) ids.wide.push_back(id);
    if (weighted) ids.weights.push_back(static_cast<float>(Unit(random)));
  }
  return ids;
}

OwnedIds Sparse(std::mt19937_64& random, const std::string& feature, int64_t vocabulary,
                int64_t samples) {
  OwnedIds ids = Ragged(random, feature, vocabulary, samples, /*weighted=*/false);
  for (int64_t s = 0; s < samples; ++s) {
    for (int64_t i = ids.splits[s]; i < ids.splits[s + 1]; ++i) {
      ids.indices.insert(ids.indices.end(), {s, i - ids.splits[s]});
    }
  }
  ids.splits.clear();
  ids.samples = samples;
  return ids;
}

}  // namespace

client::ModelDescription MixedModel(const std::string& name) {
  using client::Combiner;
  const client::Optimizer adagrad{"adagrad", {{"learning_rate", 0.1f}}};
  const client::Optimizer sgd{"sgd", {{"learning_rate", 0.05f}}};
  client::ModelDescription model;
  model.name = name;
  model.seed = 11;
  const auto table = [&](const char* table_name, int64_t vocabulary, int32_t dim, Combiner combiner,
                         const client::Optimizer& optimizer) {
    client::TableDescription& added = model.tables.emplace_back();
    added.name = table_name;
    added.vocabulary_size = vocabulary;
    added.embedding_dim = dim;
    added.combiner = combiner;
    added.optimizer = optimizer;
  };
  // Only tables of one combiner are stacked.
  table("users", 1000, 16, Combiner::kMean, adagrad);
  table("items", 517, 16, Combiner::kMean, adagrad);
  table("tags", 60, 12, Combiner::kSqrtn, adagrad);
  table("genres", 33, 12, Combiner::kSqrtn, adagrad);
  table("cities", 300, 5, Combiner::kSum, sgd);
  table("days", 7, 5, Combiner::kSum, sgd);
  model.features = {{"user", "users", 64},    {"friends", "users", 64}, {"item", "items", 64},
                    {"history", "items", 64}, {"tag", "tags", 64},      {"genre", "genres", 64},
                    {"city", "cities", 64},   {"day", "days", 64}};
  return model;
}

std::vector<client::FeatureIds> Features(const std::vector<OwnedIds>& batch) {
  std::vector<client::FeatureIds> features;
  for (const OwnedIds& ids : batch) {
    client::FeatureIds& feature = features.emplace_back();
    feature.feature = ids.feature;
    feature.weights = ids.weights;
    client::IntSpan values = ids.wide;
    if (!ids.narrow.empty()) values = ids.narrow;
    if (ids.ids_per_sample > 0) {
      feature.ids = client::DenseIds{values, ids.ids_per_sample};
    } else if (!ids.splits.empty()) {
      feature.ids = client::RaggedIds{ids.splits, values};
    } else {
      feature.ids = client::SparseIds{ids.indices, values, ids.samples};
    }
  }
  return features;
}

std::vector<OwnedIds> MixedBatch(uint64_t seed, int64_t samples) {
  std::mt19937_64 random(seed);
  return {Dense(random, "user", 1000, samples, 1, /*narrow=*/false, /*weighted=*/false),
          Ragged(random, "friends", 1000, samples, /*weighted=*/true),
          Dense(random, "item", 517, samples, 3, /*narrow=*/true, /*weighted=*/true),
          Ragged(random, "history", 517, samples, /*weighted=*/false),
          Sparse(random, "tag", 60, samples),
          Dense(random, "genre", 33, samples, 4, /*narrow=*/true, /*weighted=*/false),
          Dense(random, "city", 300, samples, 1, /*narrow=*/true, /*weighted=*/false),
          Ragged(random, "day", 7, samples, /*weighted=*/true)};
}

std::vector<std::vector<float>> MixedGradients(uint64_t seed, const client::LookupResult& found) {
  std::mt19937_64 random(seed ^ 0x9e3779b97f4a7c15u);
  std::vector<std::vector<float>> gradients;
  for (const client::Activation& activation : found.activations) {
    std::vector<float>& gradient = gradients.emplace_back();
    const float part = 0.5f * std::min(1.0f, 64.0f / static_cast<float>(activation.samples));
    for (const float value : activation.values) {
      gradient.push_back(part * value + static_cast<float>(Unit(random) - 0.5));
    }
  }
  return gradients;
}

std::vector<client::FeatureGradient> Gradients(const client::LookupResult& found,
                                               const std::vector<std::vector<float>>& values) {
  std::vector<client::FeatureGradient> gradients;
  for (size_t i = 0; i < values.size(); ++i) {
    gradients.push_back({found.activations[i].feature, values[i], found.activations[i].samples});
  }
  return gradients;
}

absl::Status TrainStep(client::Client& client, const client::Model& model, uint64_t seed,
                       int64_t samples) {
  const std::vector<OwnedIds> batch = MixedBatch(seed, samples);
  absl::StatusOr<client::LookupResult> found = client.Lookup(model, Features(batch));
  if (!found.ok()) return found.status();
  const std::vector<std::vector<float>> gradients = MixedGradients(seed, *found);
  return client.ApplyGradients(model, found->batch, Gradients(*found, gradients)).status();
}

client::ClusterStatus AwaitAllShards(client::Client& client) {
  return Await([&] { return client.GetStatus(); },
               [](const auto& seen) {
                 return seen.ok() && std::all_of(seen->shards.begin(), seen->shards.end(),
                                                 [](const auto& shard) { return shard.reachable; });
               })
      .value_or(client::ClusterStatus());
}

absl::StatusOr<std::string> Digest(client::Client& client, const client::Model& model) {
  Sha256Stream sha;
  for (const client::TableInfo& table : model.tables) {
    std::vector<std::string> parts = {""};  // the weights
    parts.insert(parts.end(), table.slots.begin(), table.slots.end());
    for (const std::string& slot : parts) {
      client::ExportOptions options;
      options.slot = slot;
      const absl::Status status = client.ExportTable(
          model, table.name,
          [&](int64_t, absl::Span<const float> values, int64_t) {
            sha.Add({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)});
            return absl::OkStatus();
          },
          options);
      if (!status.ok()) return status;
    }
  }
  return sha.Hex();
}

}  // namespace emberd::testing
