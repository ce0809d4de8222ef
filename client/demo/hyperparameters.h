// Sizes and learning rates of a run, and which examples each trainer reads when.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace emberd::demo {

struct Hyperparameters {
  int embedding_dim = 8;
  std::vector<int> hidden = {64, 32};
  float embedding_learning_rate = 0.05f;
  float embedding_initial_accumulator = 0.1f;
  float embedding_initial_range = 0.05f;  // rows start uniform in +- this
  float dense_learning_rate = 0.05f;
  float dense_initial_accumulator = 0.1f;
  // Of every table, in one mini-batch; 0: no limit. Results do not depend on it.
  int32_t max_ids_per_partition = 0;
  uint64_t seed = 1;
};

struct ExampleRange {
  int64_t first = 0;
  int64_t count = 0;
};

// Rounds of `trainers` batches that together cover the first `examples` positions of a dataset
// once: in round t trainer r reads the batch at (t * trainers + r) * batch_size. The last batches
// may be short or empty.
struct Schedule {
  int64_t examples = 0;
  int64_t batch_size = 1024;
  int trainers = 1;
  // Lookups do not see the update of the round before theirs.
  bool pipelined = false;

  int64_t Rounds() const {
    const int64_t per_round = batch_size * trainers;
    return (examples + per_round - 1) / per_round;
  }
  ExampleRange Range(int64_t round, int rank) const {
    const int64_t first = (round * trainers + rank) * batch_size;
    return {first, std::clamp<int64_t>(examples - first, 0, batch_size)};
  }
};

}  // namespace emberd::demo
