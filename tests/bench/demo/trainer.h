// A trainer of the demo: a process that holds the dense part of a model and trains it together with
// embeddings in emberd, as one rank of a group of trainers. client/examples/trainer.cc has the same
// steps without what keeps a run alive when something dies.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tests/bench/demo/experiment.h"
#include "tests/bench/demo/group.h"

namespace emberd::demo {

struct TrainerSetup {
  std::vector<std::string> coordinators;  // "host:port"; rank r prefers the r-th
  int rank = 0;
  std::string group_name;  // in emberd; empty: one that nobody else has
  // Asks for a checkpoint after every so many steps, and leaves the dense part of the model beside
  // it: see SavedRun. 0: never.
  int64_t checkpoint_every = 0;
  std::string checkpoint_folder;
};

// Trains a rank's share of the experiment's schedule.
//
// While the cluster cannot serve, the trainer reports it, declares the model anew where that is
// needed, and tries to join its group again; then it goes on with the step at which the group
// stands. Gives up when nothing has worked for two minutes.
absl::Status RunTrainer(const Experiment& experiment, const TrainerSetup& setup, Group* group);

}  // namespace emberd::demo
