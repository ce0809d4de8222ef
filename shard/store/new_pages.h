// How much memory rows will take that nobody has touched yet.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "shard/store/stack_store.h"

namespace emberd::shard {

// Collects rows of one stack, each as often as one likes. Not thread-safe; others may touch rows in
// the meantime, so the result is what was true a moment ago.
class NewPages {
 public:
  explicit NewPages(const StackStore& store);

  void Add(int64_t row);
  // Of the pages that hold weights and slots of the rows added, and of no row touched before.
  int64_t bytes() const;

 private:
  struct Array {
    int64_t row_bytes = 0;
    int64_t page_bytes = 0;
    absl::flat_hash_set<int64_t> pages;
  };

  const StackStore& store_;
  std::vector<Array> arrays_;  // the weights, then each slot
};

}  // namespace emberd::shard
