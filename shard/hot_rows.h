// Which rows of a stack are looked up most: one sketch for each of its tables, over a sample of the
// entries of all gathers.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "shard/batch.h"
#include "shard/engine.h"
#include "shard/space_saving.h"
#include "shard/stack_store.h"

namespace emberd::shard {

// One in kHotRowSampling entries counts, for kHotRowSampling. At 60 ns for each that is 0.2 ns an
// entry, where a gather takes several.
inline constexpr int64_t kHotRowSampling = 256;

// Counters for a table: the tables of a model share 65,536, but each has 128 to 1024.
int HotRowCounters(int tables);

// Thread-safe.
class HotRowSketches {
 public:
  // `store` must outlive it.
  HotRowSketches(const StackStore& store, int counters, int64_t sampling = kHotRowSampling);

  // Distances between the entries that count are random, so that no period of the batches can hide
  // a row, but the same in every run that gathers the same batches in the same order.
  void Sample(const StackEntries& entries);

  // The hottest rows of every table of the stack, at most `count` each; `model` is left empty.
  std::vector<HotTable> Top(int count) const;

 private:
  int64_t NextDistance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const StackStore& store_;
  const int64_t sampling_;

  // Taken once for a gather of the stack.
  mutable std::mutex mutex_;
  uint64_t distances_ ABSL_GUARDED_BY(mutex_) = 0;  // drawn so far
  int64_t to_next_ ABSL_GUARDED_BY(mutex_);         // entries before the next that counts
  std::vector<SpaceSaving> sketches_ ABSL_GUARDED_BY(mutex_);  // by table
};

}  // namespace emberd::shard
