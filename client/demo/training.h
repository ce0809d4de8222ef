// The part of the demo in which the model learns: trainer processes at work, watched.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/demo/child.h"
#include "client/demo/curve.h"
#include "client/demo/dense_model.h"
#include "client/demo/descriptor.h"
#include "client/demo/display.h"
#include "client/demo/embeddings.h"
#include "client/demo/experiment.h"
#include "client/demo/hub.h"
#include "client/demo/metrics.h"
#include "client/demo/monitor.h"

namespace emberd::demo {

struct TrainingResult {
  std::vector<CurvePoint> curve;
  int64_t examples = 0;
  double seconds = 0;  // of training, without evaluations
  int64_t batches = 0;
  RoundReport total;  // over all batches
  int lost_trainers = 0;
};

// Not thread-safe; belongs to the main thread. What it is given must outlive it.
class Training {
 public:
  struct Setup {
    const Experiment* experiment;
    Embeddings* embeddings;
    Monitor* monitor;
    Display* display;
    std::function<bool()> stop_requested;
    std::function<bool()> cluster_runs;
    // Command line of the trainer of a rank, whose group is at descriptor kExtraDescriptor.
    std::function<std::vector<std::string>(int rank)> trainer_command;
  };
  explicit Training(Setup setup);

  // Starts the trainers and blocks until they are done. CANCELLED when a stop is asked for,
  // UNAVAILABLE when all trainers or the cluster's supervisor are gone. No trainer is left either
  // way.
  absl::Status Run();

  const TrainingResult& result() const { return result_; }
  // The replica of the dense part as the trainers have it.
  const DenseModel& dense() const { return dense_; }

 private:
  absl::Status StartTrainers();
  absl::Status Loop(Hub* hub);
  void OnSum(const std::vector<Contribution>& contributions, const GradientSum& sum);
  void OnRound(int64_t round, const std::vector<RoundReport>& reports);
  void OnGone(int rank);
  int64_t CurvePointAfter(int64_t round) const;
  void Evaluate();
  // Of training so far, without evaluations.
  double Seconds() const;
  Progress CurrentProgress();

  Setup setup_;
  DenseModel dense_;
  RollingMetrics metrics_;
  TrainingResult result_;
  int64_t rounds_done_ = 0;
  absl::Time start_;
  absl::Duration paused_;  // in evaluations
  int64_t shown_examples_ = 0;
  double shown_seconds_ = 0;
  std::vector<Descriptor> sockets_;
  std::vector<std::unique_ptr<Child>> trainers_;
};

}  // namespace emberd::demo
