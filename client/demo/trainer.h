// The example trainer: a process that holds the dense part of a model and trains it together with
// embeddings in emberd.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "client/demo/experiment.h"
#include "client/demo/group.h"

namespace emberd::demo {

// Trains rank `rank`'s share of the experiment's schedule against the cluster behind `coordinator`
// ("host:port").
//
// While the cluster cannot serve, the trainer reports it, declares the model anew where that is
// needed, and tries again; an update that fails is reported and left out. Gives up when nothing has
// worked for two minutes.
absl::Status RunTrainer(const Experiment& experiment, const std::string& coordinator, int rank,
                        Group* group);

}  // namespace emberd::demo
