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
  int replaced_trainers = 0;
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

  // Starts the trainers and blocks until they are done. A trainer that is killed is started again.
  // CANCELLED when a stop is asked for, UNAVAILABLE when a trainer gives up or the cluster's
  // supervisor is gone. No trainer is left either way.
  absl::Status Run();

  const TrainingResult& result() const { return result_; }
  // The replica of the dense part as the trainers have it.
  const DenseModel& dense() const { return dense_; }

 private:
  absl::Status Start();
  // Starts the trainer of a rank and gives the other end of its socket.
  absl::StatusOr<int> StartTrainer(int rank);
  absl::Status Loop();
  void OnSum(const std::vector<Contribution>& contributions, const GradientSum& sum);
  void OnRound(int64_t round, const std::vector<RoundReport>& reports);
  void OnGone(int rank);
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
  std::vector<Descriptor> sockets_;  // by rank
  std::unique_ptr<Hub> hub_;
  absl::Status trainer_status_;  // of one that cannot be replaced
  std::vector<std::unique_ptr<Child>> trainers_;
};

}  // namespace emberd::demo
