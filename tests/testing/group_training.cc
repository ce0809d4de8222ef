#include "tests/testing/group_training.h"

#include <algorithm>
#include <memory>
#include <random>
#include <thread>

#include "absl/synchronization/mutex.h"

namespace emberd::testing {
namespace {

constexpr int64_t kSamplesOfFeature[] = {24, 17, 30};  // of the global batch, by feature
constexpr int64_t kVocabularyOfFeature[] = {300, 300, 90};
constexpr const char* kNames[] = {"clicked", "seen", "shop"};
constexpr int kFeatures = 3;

uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The ids of one sample of the global batch.
std::vector<int64_t> SampleIds(int64_t step, int feature, int64_t sample) {
  std::mt19937_64 random(Mix(static_cast<uint64_t>((step * kFeatures + feature) * 1000 + sample)));
  std::vector<int64_t> ids(random() % 9);
  for (int64_t& id : ids) {
    const uint64_t vocabulary = static_cast<uint64_t>(kVocabularyOfFeature[feature]);
    id = static_cast<int64_t>(random() % (random() % 2 == 0 ? vocabulary : vocabulary / 10));
  }
  return ids;
}

// Where the samples of `rank` begin: uneven, and different from feature to feature.
int64_t FirstSample(int feature, int rank, int size) {
  const int64_t samples = kSamplesOfFeature[feature];
  if (rank == size) return samples;
  const int64_t even = samples * rank / size;
  return rank == 0 ? 0 : std::min(samples, even + (feature == 1 ? samples / size : rank));
}

}  // namespace

client::ModelDescription GroupModel(const std::string& name, int limit) {
  client::ModelDescription model;
  model.name = name;
  model.seed = 5;
  const auto table = [&](const char* table_name, int64_t vocabulary, int32_t dim,
                         const client::Optimizer& optimizer) {
    client::TableDescription& added = model.tables.emplace_back();
    added.name = table_name;
    added.vocabulary_size = vocabulary;
    added.embedding_dim = dim;
    added.optimizer = optimizer;
    added.max_unique_ids_per_partition = limit;
  };
  table("items", kVocabularyOfFeature[0], 12, {"adagrad", {{"learning_rate", 0.1f}}});
  table("shops", kVocabularyOfFeature[2], 8,
        {"adam", {{"learning_rate", 0.01f}, {"bias_correction", 1}}});
  model.features = {{"clicked", "items", 24}, {"seen", "items", 24}, {"shop", "shops", 32}};
  return model;
}

Share MakeShare(int64_t step, int rank, int size) {
  Share share;
  for (int feature = 0; feature < kFeatures; ++feature) {
    const int64_t begin = FirstSample(feature, rank, size);
    const int64_t end = FirstSample(feature, rank + 1, size);
    share.features.emplace_back(kNames[feature]);
    share.first_sample.push_back(begin);
    std::vector<int64_t>& ids = share.ids.emplace_back();
    std::vector<int64_t>& splits = share.splits.emplace_back(1, 0);
    for (int64_t sample = begin; sample < end; ++sample) {
      const std::vector<int64_t> more = SampleIds(step, feature, sample);
      ids.insert(ids.end(), more.begin(), more.end());
      splits.push_back(static_cast<int64_t>(ids.size()));
    }
  }
  return share;
}

std::vector<client::FeatureIds> Share::Features() const {
  std::vector<client::FeatureIds> result;
  for (size_t i = 0; i < features.size(); ++i) {
    result.push_back({features[i], client::RaggedIds{absl::MakeConstSpan(splits[i]),
                                                     absl::MakeConstSpan(ids[i])}});
  }
  return result;
}

std::vector<std::vector<float>> ShareGradients(int64_t step, const Share& share,
                                               const std::vector<client::Activation>& activations) {
  std::vector<std::vector<float>> gradients;
  for (size_t i = 0; i < activations.size(); ++i) {
    const client::Activation& activation = activations[i];
    std::vector<float>& gradient = gradients.emplace_back(activation.values.size());
    for (int64_t s = 0; s < activation.samples; ++s) {
      for (int64_t d = 0; d < activation.dim; ++d) {
        const int64_t cell = s * activation.dim + d;
        const uint64_t noise = Mix(static_cast<uint64_t>(
            ((step * kFeatures + static_cast<int64_t>(i)) * 100 + share.first_sample[i] + s) * 100 +
            d));
        gradient[cell] = 0.5f * activation.values[cell] +
                         static_cast<float>(static_cast<double>(noise >> 11) * 0x1p-53 - 0.5);
      }
    }
  }
  return gradients;
}

namespace {

absl::Status SendUpdate(client::TrainStream& stream, int64_t step, const Share& share,
                        const client::TrainLookupResult& found) {
  const auto gradients = ShareGradients(step, share, found.activations);
  std::vector<client::FeatureGradient> request;
  for (size_t i = 0; i < gradients.size(); ++i) {
    request.push_back({share.features[i], gradients[i], found.activations[i].samples});
  }
  return stream.SendUpdate(step, request);
}

}  // namespace

absl::Status RunSteps(client::TrainStream& stream, int rank, int size, int64_t begin, int64_t end,
                      bool pipelined, const LookupObserver& saw, const SkippedSteps& skips) {
  const auto send_lookup = [&](int64_t step) {
    return stream.SendLookup(step, MakeShare(step, rank, size).Features());
  };
  if (begin < end) {
    if (absl::Status status = send_lookup(begin); !status.ok()) return status;
  }
  for (int64_t step = begin; step < end; ++step) {
    auto found = stream.ReceiveLookup();
    if (!found.ok()) return found.status();
    if (saw != nullptr) saw(*found);
    absl::Status status;
    // The next ids go before this step's update: ahead of it if pipelined, else as a prefetch.
    if (step + 1 < end) status = send_lookup(step + 1);
    const bool skip = skips != nullptr && skips(step);
    if (status.ok()) {
      status = skip ? stream.SendUpdate(step, {}, {.skip = true})
                    : SendUpdate(stream, step, MakeShare(step, rank, size), *found);
    }
    if (!status.ok()) return status;
    if (pipelined && step + 1 == end) break;  // answered when the stream ends
    auto updated = stream.ReceiveUpdate();
    if (!updated.ok()) return updated.status();
  }
  return absl::OkStatus();
}

absl::Status TrainGroup(const Cluster& cluster, const client::Model& model,
                        const client::TrainOptions& options, int coordinators, int64_t steps,
                        const LookupObserver& saw, const SkippedSteps& skips) {
  absl::Mutex mutex;
  absl::Status error;
  const auto observe = [&](const client::TrainLookupResult& found) {
    const absl::MutexLock lock(&mutex);
    if (saw != nullptr) saw(found);
  };
  const auto train = [&](int rank) -> absl::Status {
    client::ClientOptions client_options;
    client_options.tls = cluster.client_options().tls;
    client_options.token = cluster.client_options().token;
    client_options.addresses = {cluster.address(rank % coordinators)};
    auto client = client::Client::Connect(client_options);
    if (!client.ok()) return client.status();
    client::TrainOptions own = options;
    own.rank = rank;
    auto stream = (*client)->Train(model, own);
    if (!stream.ok()) return stream.status();
    const int64_t begin = (*stream)->next_step();
    absl::Status status =
        RunSteps(**stream, rank, own.size, begin, begin + steps, own.pipelined, observe, skips);
    return status.ok() ? (*stream)->Finish() : status;
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options.size; ++rank) {
    threads.emplace_back([&, rank] {
      const absl::Status status = train(rank);
      const absl::MutexLock lock(&mutex);
      if (error.ok()) error = status;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return error;
}

}  // namespace emberd::testing
