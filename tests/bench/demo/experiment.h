// One run: which data, which model, which schedule. The demo and its trainers make the same one
// from the same options.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/train_stream.h"
#include "tests/bench/demo/dataset.h"

namespace CLI {
class App;
}

namespace emberd::demo {

// Sizes and learning rates.
struct Hyperparameters {
  int embedding_dim = 8;
  std::vector<int> hidden = {64, 32};
  float embedding_learning_rate = 0.05f;
  float embedding_initial_accumulator = 0.1f;
  float embedding_initial_range = 0.05f;  // rows start uniform in +- this
  float dense_learning_rate = 0.05f;
  float dense_initial_accumulator = 0.1f;
  // Of every table, in one mini-batch; 0: no limit. Results do not depend on it.
  int32_t max_ids_per_partition = 0;
  uint64_t seed = 1;
};

struct ExampleRange {
  int64_t first = 0;
  int64_t count = 0;
};

// Rounds of `trainers` batches that together cover the first `examples` positions of a dataset
// once: in round t trainer r reads the batch at (t * trainers + r) * batch_size. The last batches
// may be short or empty.
struct Schedule {
  int64_t examples = 0;
  int64_t batch_size = 1024;
  int trainers = 1;
  // Lookups do not see the update of the round before theirs.
  bool pipelined = false;

  int64_t Rounds() const {
    const int64_t per_round = batch_size * trainers;
    return (examples + per_round - 1) / per_round;
  }
  ExampleRange Range(int64_t round, int rank) const {
    const int64_t first = (round * trainers + rank) * batch_size;
    return {first, std::clamp<int64_t>(examples - first, 0, batch_size)};
  }
};

struct ExperimentOptions {
  // Empty: generate a click log; otherwise a Criteo TSV file or a MovieLens directory.
  std::string data;
  uint64_t seed = 1;
  int64_t examples = 0;  // to train on; 0: as the data suggest
  int64_t batch = 0;     // per trainer and round; 0: as the data suggest
  int trainers = 2;
  bool quick = false;                // a short run, whose model is far from done
  std::string limits = "none";       // "none", "tight", or ids per partition and mini-batch
  std::string consistency = "sync";  // "sync", "async" or "bounded:K"
  bool pipelined = false;

  void AddTo(CLI::App* app);
  // The command line that gives these options.
  std::vector<std::string> Arguments() const;
};

struct Experiment {
  std::unique_ptr<Dataset> dataset;
  Hyperparameters parameters;
  Schedule schedule;
  client::TrainOptions group;  // of the trainers, but for its name and the rank
  int64_t held_out = 0;        // examples on which the model is judged
  int curve_points = 0;        // evaluations along the way
  double max_gap = 0;          // best AUC less reached AUC that a run may end with

  // Whether the model is judged after a round, for the learning curve. Points stand at equal
  // distances of the square root of the round, as a model learns most at first; the last round has
  // one.
  bool EvaluatesAfter(int64_t round) const;
};

// Errors name what is wrong with the options or the data.
absl::StatusOr<Experiment> MakeExperiment(const ExperimentOptions& options);

}  // namespace emberd::demo
