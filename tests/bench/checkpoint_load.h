// A trainer that never rests, for benchmarks of what happens beside it.
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "tests/bench/step_trainer.h"

namespace emberd::bench {

// Trains the model of a shape on a thread of its own, on batch after batch of skewed ids, until it
// goes away.
class TrainingLoad {
 public:
  TrainingLoad(const client::ClientOptions& options, const StepShape& shape);
  ~TrainingLoad();

  // Seconds of every step that has ended since the last call.
  std::vector<double> TakeSteps();

 private:
  void Run();

  static constexpr int kBatches = 16;  // that follow one another

  const StepShape shape_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<client::TrainStream> stream_;
  std::vector<std::vector<int32_t>> ids_;  // by batch, then feature
  std::vector<std::string> names_;
  std::atomic<bool> stop_{false};
  absl::Mutex mutex_;
  std::vector<double> steps_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace emberd::bench
