// The entries of a stack's batch as they arrive: runs of one source slot, partition and mini-batch
// each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "preprocess/batch/csr.h"

namespace emberd::shard {

// The live cells of one (segment, partition).
struct Run {
  const int32_t* rows;  // local rows of the partition
  const int32_t* samples;
  const float* gains;
  int64_t size;
};

// INVALID_ARGUMENT "batch, stack <stack>: <what>".
absl::Status InvalidBatch(const preprocess::StackBatchView& view, absl::string_view what);

// Cuts the segments of a batch into runs.
class RunTable {
 public:
  // INVALID_ARGUMENT if the counts and row ends of `view` do not fit together or its arrays; rows,
  // samples and gains are not looked at.
  static absl::StatusOr<RunTable> Make(const preprocess::StackBatchView& view, int partitions);

  int slots() const { return slots_; }
  int partitions() const { return partitions_; }
  int minibatches() const { return minibatches_; }
  size_t size() const { return runs_.size(); }
  // Runs are numbered [slot][partition][mini-batch].
  int64_t index(int slot, int partition, int minibatch) const {
    return (int64_t{slot} * partitions_ + partition) * minibatches_ + minibatch;
  }
  const Run& at(int slot, int partition, int minibatch) const {
    return runs_[index(slot, partition, minibatch)];
  }
  const std::vector<int64_t>& partition_entries() const { return partition_entries_; }
  int64_t entries() const {
    return std::accumulate(partition_entries_.begin(), partition_entries_.end(), int64_t{0});
  }

 private:
  RunTable(int slots, int partitions, int minibatches)
      : slots_(slots),
        partitions_(partitions),
        minibatches_(minibatches),
        partition_entries_(partitions) {}
  absl::Status AddSegment(const preprocess::StackBatchView& view, size_t s);

  int slots_;
  int partitions_;
  int minibatches_;
  std::vector<Run> runs_;
  std::vector<int64_t> partition_entries_;
};

}  // namespace emberd::shard
