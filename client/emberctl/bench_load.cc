#include "client/emberctl/bench_load.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace emberd::emberctl {
namespace {

// Enough that rows do not stay in the caches, few enough that the ids of a client take little
// memory.
constexpr int64_t kMostBatches = 16;
constexpr int64_t kMostIds = int64_t{1} << 20;

}  // namespace

int64_t DrawId(double uniform, int64_t vocabulary, double exponent) {
  const auto size = static_cast<double>(vocabulary);
  if (exponent == 0) return std::min(static_cast<int64_t>(uniform * size), vocabulary - 1);
  // Inverse of the distribution with density x^-exponent on [1, vocabulary + 1).
  const double power = 1 - exponent;
  const double x = std::abs(power) < 1e-9
                       ? std::exp(uniform * std::log(size + 1))
                       : std::pow(1 + uniform * (std::pow(size + 1, power) - 1), 1 / power);
  const auto rank = std::clamp<int64_t>(static_cast<int64_t>(x) - 1, 0, vocabulary - 1);
  constexpr uint64_t kScatter = 2654435761u;
  return static_cast<int64_t>(static_cast<uint64_t>(rank) * kScatter %
                              static_cast<uint64_t>(vocabulary));
}

BenchBatches::BenchBatches(const client::Model& model, const LoadShape& shape, uint64_t seed) {
  const auto features = static_cast<int64_t>(model.features.size());
  const int64_t ids_of_feature = shape.batch * shape.ids_per_sample;
  const int64_t count = std::clamp<int64_t>(
      kMostIds / std::max<int64_t>(features * ids_of_feature, 1), 1, kMostBatches);
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform(0, 1);
  batches_.resize(count);
  for (Batch& batch : batches_) {
    batch.ids.reserve(features);
    for (const client::FeatureInfo& feature : model.features) {
      const int64_t vocabulary = model.FindTable(feature.table)->vocabulary_size;
      std::vector<int64_t>& ids = batch.ids.emplace_back(ids_of_feature);
      for (int64_t& id : ids) id = DrawId(uniform(random), vocabulary, shape.zipf);
      batch.features.push_back({feature.name, client::DenseIds{ids, shape.ids_per_sample}});
    }
  }
  int64_t widest = 0;
  for (const client::FeatureInfo& feature : model.features) {
    widest = std::max<int64_t>(widest, feature.embedding_dim);
  }
  gradient_.assign(shape.batch * widest, 1e-3f);
  for (const client::FeatureInfo& feature : model.features) {
    gradients_.push_back({feature.name,
                          absl::MakeConstSpan(gradient_).first(shape.batch * feature.embedding_dim),
                          shape.batch});
  }
}

const std::vector<client::FeatureIds>& BenchBatches::Next() {
  return batches_[next_++ % batches_.size()].features;
}

void BenchResult::AddError(const absl::Status& status) {
  ++errors[absl::StatusCodeToString(status.code())];
  first_error.Update(status);
}

void BenchResult::Add(const BenchResult& more) {
  lookups.insert(lookups.end(), more.lookups.begin(), more.lookups.end());
  updates.insert(updates.end(), more.updates.begin(), more.updates.end());
  steps.insert(steps.end(), more.steps.begin(), more.steps.end());
  for (const auto& [code, count] : more.errors) errors[code] += count;
  first_error.Update(more.first_error);
}

int64_t BenchResult::error_count() const {
  int64_t count = 0;
  for (const auto& [code, times] : errors) count += times;
  return count;
}

float LatencyQuantile(std::vector<float>* latencies, double fraction) {
  if (latencies->empty()) return 0;
  const double wanted = std::ceil(fraction * static_cast<double>(latencies->size()));
  const auto place = static_cast<int64_t>(std::max(wanted, 1.0)) - 1;
  std::nth_element(latencies->begin(), latencies->begin() + place, latencies->end());
  return (*latencies)[place];
}

}  // namespace emberd::emberctl
