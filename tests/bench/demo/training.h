// The part of the demo in which the model learns: trainer processes at work, watched and judged.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/child_process.h"
#include "base/file_descriptor.h"
#include "tests/bench/demo/cluster.h"
#include "tests/bench/demo/dataset.h"
#include "tests/bench/demo/dense_model.h"
#include "tests/bench/demo/display.h"
#include "tests/bench/demo/embeddings.h"
#include "tests/bench/demo/experiment.h"
#include "tests/bench/demo/group.h"
#include "tests/bench/demo/hub.h"
#include "tests/bench/demo/metrics.h"

namespace emberd::demo {

// Looks the first `examples` held-out ones up (inference only: nothing changes) and scores them.
// CANCELLED once `cancelled`, asked between batches, says so.
absl::StatusOr<Evaluation> EvaluateHeldOut(const Dataset& dataset, const DenseModel& dense,
                                           Embeddings* embeddings, int64_t examples,
                                           const std::function<bool()>& cancelled);

// AUC over the same examples of the very probabilities by which their labels were drawn: no model
// can be expected to do better. -1 where the dataset does not know them.
absl::StatusOr<double> PlantedAuc(const Dataset& dataset, int64_t examples);

// Not thread-safe; belongs to the main thread. What it is given must outlive it.
class Training {
 public:
  struct Setup {
    const Experiment* experiment;
    Embeddings* embeddings;
    Position start;  // of a run that goes on
    Monitor* monitor;
    Display* display;
    std::function<bool()> stop_requested;
    std::function<bool()> cluster_runs;
    // Command line of the trainer of a rank, whose group is at ChildProcess::kExtraDescriptor.
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
  std::vector<FileDescriptor> sockets_;  // by rank
  std::unique_ptr<Hub> hub_;
  absl::Status trainer_status_;  // of one that cannot be replaced
  std::vector<std::unique_ptr<ChildProcess>> trainers_;
};

}  // namespace emberd::demo
