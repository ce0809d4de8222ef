// A small model with every form of input, batches for it, and the fingerprint of its tables. All of
// it is a function of its arguments alone, so that runs can be compared bit by bit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"

namespace emberd::testing {

// Three stacks (16, 12 and 5 columns; Adagrad and SGD) of two tables each; eight features, some of
// which share a table.
client::ModelDescription MixedModel(const std::string& name);

// The ids of one feature of a batch, in memory of its own.
struct OwnedIds {
  std::string feature;
  std::vector<int32_t> narrow;   // ids, if not empty
  std::vector<int64_t> wide;     // ids otherwise
  std::vector<int64_t> splits;   // ragged
  std::vector<int64_t> indices;  // sparse
  std::vector<float> weights;
  int64_t ids_per_sample = 0;  // dense, if > 0
  int64_t samples = 0;
};
// Points into `batch`.
std::vector<client::FeatureIds> Features(const std::vector<OwnedIds>& batch);

// Skewed ids, repeats within a sample, empty samples; the same for the same seed on every machine.
std::vector<OwnedIds> MixedBatch(uint64_t seed, int64_t samples);

// Gradients of a lookup: half of each activation plus noise from the seed, so that a difference of
// one bit in any activation shows in the tables. Of more than 64 samples, which would drive rows to
// infinity within 50 steps, a smaller part of each.
std::vector<std::vector<float>> MixedGradients(uint64_t seed, const client::LookupResult& found);
std::vector<client::FeatureGradient> Gradients(const client::LookupResult& found,
                                               const std::vector<std::vector<float>>& values);

// Lookup and ApplyGradients of MixedBatch(seed, samples).
absl::Status TrainStep(client::Client& client, const client::Model& model, uint64_t seed,
                       int64_t samples);

// Of a cluster whose shards all answer. One that does not within a second, as on a busy machine,
// shows nothing.
client::ClusterStatus AwaitAllShards(client::Client& client);

// SHA-256, as hex digits, over the exported weights and slots of all tables.
absl::StatusOr<std::string> Digest(client::Client& client, const client::Model& model);

}  // namespace emberd::testing
