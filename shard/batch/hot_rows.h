// Which rows of a stack are looked up most: one sketch for each of its tables, over a sample of the
// entries of all gathers.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "base/mutex.h"
#include "shard/batch/batch.h"
#include "shard/store/stack_store.h"
#include "shard/types.h"

namespace emberd::shard {

// The most frequent keys of a stream, in fixed memory: the Space-Saving algorithm (Metwally,
// Agrawal and El Abbadi, 2005) with weights.
//
// With C counters and a total weight of N: every key of weight above N / C has a counter, and a
// counter is too high by at most its `error`, which is at most N / C. As long as there are at most
// C different keys, all counts are exact. Depends on the order of the stream, on nothing else. Not
// thread-safe.
class SpaceSaving {
 public:
  struct Item {
    uint32_t key = 0;
    int64_t count = 0;
    int64_t error = 0;
  };

  explicit SpaceSaving(int counters) : counters_(counters) {}  // >= 1
  SpaceSaving(SpaceSaving&&) = default;  // a copy would have its counters elsewhere

  // `weight` > 0. O(log C).
  void Add(uint32_t key, int64_t weight);

  int64_t total() const { return total_; }
  // At most `count` items, largest counts first, then smallest keys.
  std::vector<Item> Top(int count) const;

 private:
  struct Colder {
    bool operator()(const Item& a, const Item& b) const {
      return a.count != b.count ? a.count < b.count : a.key > b.key;
    }
  };
  using Items = std::set<Item, Colder>;

  const int counters_;
  int64_t total_ = 0;
  Items items_;
  absl::flat_hash_map<uint32_t, Items::iterator> item_of_;  // by key
};

// One in kHotRowSampling entries counts, for kHotRowSampling. It costs about 250 ns, or 0.25 ns an
// entry, of which a gather spends little: it notes the row, and the sketches hear of it later.
inline constexpr int64_t kHotRowSampling = 1024;

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
  std::vector<HotTable> Top(int count);

 private:
  int64_t NextDistance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Counts what was noted, table by table: a sketch at a time stays in the cache.
  void Count(const std::vector<uint32_t>& rows) ABSL_EXCLUSIVE_LOCKS_REQUIRED(sketches_mutex_);

  const StackStore& store_;
  const int64_t sampling_;

  // Taken once for a gather of the stack, for a moment.
  Mutex mutex_;
  uint64_t distances_ ABSL_GUARDED_BY(mutex_) = 0;  // drawn so far
  int64_t to_next_ ABSL_GUARDED_BY(mutex_);         // entries before the next that counts
  std::vector<uint32_t> noted_ ABSL_GUARDED_BY(mutex_);

  Mutex sketches_mutex_;
  std::vector<SpaceSaving> sketches_ ABSL_GUARDED_BY(sketches_mutex_);  // by table
};

}  // namespace emberd::shard
