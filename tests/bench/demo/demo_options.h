// What the demo's command line says.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/bench/demo/experiment.h"

namespace emberd::demo {

struct DemoOptions {
  ExperimentOptions experiment;
  // Coordinators ("host:port") of a cluster that is running already; empty: the demo starts one.
  std::vector<std::string> cluster;
  int coordinators = 2;
  int shards = 4;
  int sparsecores = 2;             // per shard; results depend on their total alone
  std::string out = "build/demo";  // directory for curve.csv, curve.svg, emberd.log, checkpoints
  bool keep_running = false;       // leave the cluster up until Ctrl-C
  double max_gap = -1;             // negative: the experiment's
  int64_t checkpoint_every = 0;    // steps; 0: never
  bool resume = false;             // go on from the newest checkpoint in `out`
  std::string emberd;              // path of the server's program
  std::string self;                // path of this program, to start trainers

  void AddTo(CLI::App* app);
  std::string CheckpointFolder() const { return out + "/checkpoints"; }
  // The command line of what a resumed run has in common with the one that it goes on with.
  std::vector<std::string> Arguments() const;
};

// The options of a run that goes on: those of the run that has saved its state in `folder`, with
// what the command line says besides. INVALID_ARGUMENT if it asks for another model, other data or
// another schedule.
absl::StatusOr<DemoOptions> ResumedOptions(const DemoOptions& defaults,
                                           const std::vector<std::string>& saved,
                                           const std::vector<std::string>& command_line);

// INVALID_ARGUMENT if a run with these options cannot have checkpoints that it could go on from.
absl::Status CheckCheckpointOptions(const DemoOptions& options);

}  // namespace emberd::demo
