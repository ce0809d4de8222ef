// What people see of a run: a line (or two, where it is narrow) that renews itself on a terminal, a
// line every few seconds elsewhere; and a table at the end.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/cpp/model.h"
#include "tests/bench/demo/cluster.h"
#include "tests/bench/demo/experiment.h"
#include "tests/bench/demo/group.h"
#include "tests/bench/demo/metrics.h"

namespace emberd::demo {

struct Progress {
  int64_t examples = 0, total = 0;
  double examples_per_second = 0;
  double loss = 0, auc = 0;  // of the latest training examples
  double held_out_auc = -1;  // of the last evaluation; negative: none yet
  int64_t rows_touched = 0;
  std::vector<ShardTraffic> shards = {};
};

// "[#####.....] 50%  1.00 M examples  31.2 k/s  training loss 0.5123  training AUC 0.7890  held-out
// AUC 0.7765  12.3 M rows touched  shards 0.51 0.50 0.52 down M rows/s"
std::string ProgressLine(const Progress& progress);
// The line cut where two spaces stand, so that no part of it is wider than `width` (>= 1).
std::string WrapProgress(const std::string& line, size_t width);

// Not thread-safe.
class Display {
 public:
  explicit Display(std::FILE* stream);

  // True if it is time for a new Show.
  bool Due(absl::Time now) const;
  void Show(const Progress& progress, absl::Time now);
  // The end of the work: always shown, and stays.
  void ShowLast(const Progress& progress);
  // A line that stays.
  void Print(const std::string& line);
  // Lets the line that renews itself stay.
  void Finish();

 private:
  void Erase();

  std::FILE* stream_;
  bool terminal_;
  absl::Time last_ = absl::InfinitePast();
  std::string live_;  // what stands at the end of the terminal
};

// "950", "31.2 k", "1.25 M": three digits are enough for eyes.
std::string Short(double number);

struct TrainingResult {
  std::vector<CurvePoint> curve;
  int64_t examples = 0;
  int64_t examples_before = 0;  // of them: learned before this run went on with another one's work
  double seconds = 0;           // of training, without evaluations
  int64_t batches = 0;
  RoundReport total;  // over all batches
  int replaced_trainers = 0;
};

// How good the model in the cluster is on held-out examples.
struct Evaluation {
  double auc = 0;
  double log_loss = 0;
};

// What a run came to.
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
