// Where the distinct rows of one feature lie in the shards' answers to a lookup: the trainer is
// sent them instead of activations (AnswerRows), and may send sums of gradients for them.
#pragma once

#include <cstdint>
#include <vector>

namespace emberd::server {

// Places [begin, end) among the rows that a shard has answered with for the feature's stack.
struct PlaceRange {
  int shard = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// In the order in which the trainer has the rows. Empty: it was sent activations.
using RowPlaces = std::vector<PlaceRange>;

inline int64_t CountRows(const RowPlaces& places) {
  int64_t rows = 0;
  for (const PlaceRange& range : places) rows += range.end - range.begin;
  return rows;
}

}  // namespace emberd::server
