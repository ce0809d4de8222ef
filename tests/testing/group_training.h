// Global batches that are cut over the ranks of a group, and trainers that run them on streams. All
// of it is a function of its arguments, and no gradient depends on who computes it, so that a group
// can be compared bit by bit with one trainer that is fed the whole batch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "tests/testing/cluster.h"

namespace emberd::testing {

// Adagrad and bias-corrected Adam; three features, two of which share a table, ragged. `limit`
// bounds the unique ids of a (source, partition): a small one makes many mini-batches; 0: none.
client::ModelDescription GroupModel(const std::string& name, int limit);

// One rank's share of a step: ids of each feature for some of its samples.
struct Share {
  std::vector<std::string> features;
  std::vector<std::vector<int64_t>> ids;
  std::vector<std::vector<int64_t>> splits;
  std::vector<int64_t> first_sample;  // by feature: of this share in the global batch

  std::vector<client::FeatureIds> Features() const;  // points into the share
};
// Rank `rank` of `size` has uneven runs of the samples, some none of a feature; rank 0 of 1 has
// all.
Share MakeShare(int64_t step, int rank, int size);

// Gradients of a share: each is a function of step, feature, sample of the global batch, column,
// and of the activation, so that one wrong bit of a lookup shows in the tables.
std::vector<std::vector<float>> ShareGradients(int64_t step, const Share& share,
                                               const std::vector<client::Activation>& activations);

// Steps [begin, end) of a rank on a stream that is open. `pipelined`: lookups go one step ahead of
// updates. `saw`, if given, gets every lookup's answer; `skips`, if given, says which steps are
// skipped.
using LookupObserver = std::function<void(const client::TrainLookupResult&)>;
using SkippedSteps = std::function<bool(int64_t step)>;
absl::Status RunSteps(client::TrainStream& stream, int rank, int size, int64_t begin, int64_t end,
                      bool pipelined, const LookupObserver& saw = nullptr,
                      const SkippedSteps& skips = nullptr);

// All ranks of a group, each on a thread with a client of its own, rank r on coordinator r modulo
// their number. The first error.
absl::Status TrainGroup(const Cluster& cluster, const client::Model& model,
                        const client::TrainOptions& options, int coordinators, int64_t steps,
                        const LookupObserver& saw = nullptr, const SkippedSteps& skips = nullptr);

}  // namespace emberd::testing
