// The demo: one command that starts a cluster and trainers, trains a model, judges it, and stops
// everything.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "client/demo/experiment.h"
#include "client/demo/signals.h"

namespace emberd::demo {

struct DemoOptions {
  ExperimentOptions experiment;
  int coordinators = 2;
  int shards = 4;
  int sparsecores = 2;             // per shard; results depend on their total alone
  std::string out = "build/demo";  // directory for curve.csv, curve.svg, emberd.log
  bool keep_running = false;       // leave the cluster up until Ctrl-C
  double max_gap = -1;             // negative: the experiment's
  std::string emberd;              // path of the server's program
  std::string self;                // path of this program, to start trainers
};

// Call it from main before other threads exist. The last line on standard output is
//   demo: auc=0.xxxx best_auc=0.xxxx examples_per_s=N table_sha256=...
// False: the model came out worse than it may, as has been said. CANCELLED: stopped by a signal.
absl::StatusOr<bool> RunDemo(const DemoOptions& options, StopSignals* signals);

}  // namespace emberd::demo
