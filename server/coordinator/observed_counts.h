// What the batches of a model needed, kept as counts from which limits can be set.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/statistics.pb.h"
#include "preprocess/plan/plan.h"

namespace emberd::server {

// How often which counts were seen, in a few hundred buckets at most. Not thread-safe.
class CountSketch {
 public:
  void Add(int64_t count);
  v1::CountSketch ToProto() const;
  int64_t max() const { return max_; }
  // Largest count of the bucket of `count` >= 0: itself up to 16, then at most 1/8 more.
  static int64_t Upper(int64_t count);

 private:
  int64_t max_ = 0;
  std::map<int64_t, int64_t> buckets_;  // by upper bound
};

// Thread-safe.
class ObservedCounts {
 public:
  explicit ObservedCounts(size_t stacks) : stacks_(stacks) {}

  // `statistics` has the stacks of the plan.
  void Observe(const v1::BatchStatistics& statistics);
  // With the limits of `plan` as those of now.
  v1::GetLimitsResponse Limits(const preprocess::Plan& plan) const;
  // Totals, by stack, with the limits of `plan`; `model` is not set.
  std::vector<v1::StackStats> Stats(const preprocess::Plan& plan) const;

 private:
  struct Stack {
    CountSketch ids;
    CountSketch unique_ids;
    v1::StackStats totals;  // of batches and ids
  };
  mutable absl::Mutex mutex_;
  std::vector<Stack> stacks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::server
