// What the demo says at its end.
#pragma once

#include <string>
#include <vector>

#include "client/cpp/model.h"
#include "client/demo/evaluate.h"
#include "client/demo/experiment.h"
#include "client/demo/monitor.h"
#include "client/demo/training.h"

namespace emberd::demo {

struct Outcome {
  Evaluation held_out;
  double best_auc = 0;
  bool planted = false;  // best_auc is the planted optimum, not that of a plain run
  std::string table_sha256;
  int restarts = 0;  // of shards
};

// A table of several lines.
std::string SummaryTable(const Experiment& experiment, const client::Model& model, int coordinators,
                         const TrainingResult& training, const std::vector<ShardTraffic>& shards,
                         const Outcome& outcome);
// What best_auc means in this run: one line.
std::string BestAucMeaning(const Outcome& outcome);
// "demo: auc=0.xxxx best_auc=0.xxxx examples_per_s=N table_sha256=..."
std::string LastLine(const TrainingResult& training, const Outcome& outcome);

}  // namespace emberd::demo
