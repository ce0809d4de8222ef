// Reads a trainer's next batch while the current one is being trained on.
#pragma once

#include <future>
#include <utility>

#include "absl/status/status.h"
#include "client/demo/dataset.h"
#include "client/demo/hyperparameters.h"

namespace emberd::demo {

// Not thread-safe; the dataset must outlive it.
class Prefetcher {
 public:
  Prefetcher(const Dataset* dataset, const Schedule& schedule, int rank, int64_t first_round = 0)
      : dataset_(dataset), schedule_(schedule), rank_(rank), round_(first_round) {
    Begin();
  }

  // The batches of the rounds from first_round on. Empty ones beyond the end.
  absl::Status Next(Batch* batch) {
    absl::Status status = reading_.get();
    std::swap(*batch, next_);
    Begin();
    return status;
  }

 private:
  void Begin() {
    const ExampleRange range = schedule_.Range(round_++, rank_);
    reading_ = std::async(std::launch::async, [this, range] {
      return dataset_->ReadTrain(range.first, range.count, &next_);
    });
  }

  const Dataset* dataset_;
  Schedule schedule_;
  int rank_;
  int64_t round_;
  Batch next_;
  std::future<absl::Status> reading_;  // its end is awaited by the destructor
};

}  // namespace emberd::demo
