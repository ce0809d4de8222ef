// The most frequent keys of a stream, in fixed memory: the Space-Saving algorithm (Metwally,
// Agrawal and El Abbadi, 2005) with weights.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace emberd::shard {

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

  // `weight` > 0. O(log C).
  void Add(uint32_t key, int64_t weight);

  int64_t total() const { return total_; }
  // At most `count` items, largest counts first, then smallest keys.
  std::vector<Item> Top(int count) const;

 private:
  // Moves the item at a place of the heap down to where it belongs.
  void SiftDown(int place);
  void SiftUp(int place);
  void Swap(int a, int b);

  const int counters_;
  int64_t total_ = 0;
  std::vector<Item> items_;
  // A heap of indices of items_, the smallest count on top, and where each item stands in it.
  std::vector<int> heap_;
  std::vector<int> place_;
  absl::flat_hash_map<uint32_t, int> item_of_;  // by key
};

}  // namespace emberd::shard
