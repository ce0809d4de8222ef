// One run: which data, which model, which schedule. The demo and its trainers make the same one
// from the same options.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/train_stream.h"
#include "client/demo/dataset.h"
#include "client/demo/hyperparameters.h"

namespace CLI {
class App;
}

namespace emberd::demo {

struct ExperimentOptions {
  std::string
      data;  // empty: generate a click log; otherwise a Criteo TSV file or a MovieLens directory
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
