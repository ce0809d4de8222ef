// A trainer for the benchmark of steps: it trains over Train streams and does no dense part, but
// takes as long as it is told to.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/client.h"

namespace emberd::bench {

// A recommender's sparse part: features with a table each, and ids that are skewed as real ones are
// (Zipf).
struct StepShape {
  int features = 26;
  int batch = 4096;  // samples, over all ranks
  int width = 64;
  int rows = 200'000;  // of each table
  int bag = 1;         // ids of each sample and feature
  double ids() const { return static_cast<double>(batch) * features * bag; }
  double elements() const { return static_cast<double>(batch) * features * width; }
};
std::string ModelText(const StepShape& shape);
// Row-major [samples, bag], of one feature.
std::vector<int32_t> MakeIds(const StepShape& shape, int feature);

enum class Compute { kNone, kSpin, kSleep };  // a trainer on this CPU, or on a device of its own

struct StepOptions {
  StepShape shape;
  client::WireType wire = client::WireType::kFloat32;
  int ranks = 1;           // which divide the batch; through one coordinator
  bool ids_ahead = false;  // the next step's ids are sent while this one computes
  bool pipelined = false;  // and its lookup does not wait for this step's update
  Compute compute = Compute::kNone;
  double compute_seconds = 0;  // between the activations of a step and its gradients
  int steps = 11;              // the first two warm up
};

// Medians over the steps, of rank 0.
struct StepSeconds {
  double step = 0;
  double lookup = 0;  // from sending ids to having activations; with ids ahead, waiting for them
  double update = 0;  // from sending gradients to their answer
  // As the coordinator measured them: of lookup and update together.
  double preprocess = 0, shards = 0, combine = 0, ranks = 0;
  double total = 0;  // of all steps but those that warm up
  int steps = 0;     // that these are
};

// Ends the program with a message if anything fails. `on_warm` is called after the warm-up,
// `on_end` after the last step.
StepSeconds RunSteps(
    const client::ClientOptions& client_options, const StepOptions& options,
    const std::function<void()>& on_warm = [] {}, const std::function<void()>& on_end = [] {});

void DieUnless(const absl::Status& status);

}  // namespace emberd::bench
