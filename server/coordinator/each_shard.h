// One call to each of several shards.
#pragma once

#include <cstddef>
#include <numeric>
#include <vector>

#include "absl/status/status.h"
#include "base/blocking_pool.h"

namespace emberd::server {

// Runs call(i) for every i in `shards` in parallel and waits; statuses come in the order of
// `shards`. Threads of their own: these calls are rare (declarations, row access) and block on the
// network.
template <typename Call>
std::vector<absl::Status> ForEachShard(BlockingPool* threads, const std::vector<int>& shards,
                                       const Call& call) {
  std::vector<absl::Status> statuses(shards.size());
  threads->RunEach(static_cast<int>(shards.size()), [&](int i) { statuses[i] = call(shards[i]); });
  return statuses;
}

// first, ..., count - 1.
inline std::vector<int> ShardsFrom(int first, size_t count) {
  std::vector<int> shards(count - first);
  std::iota(shards.begin(), shards.end(), first);
  return shards;
}

// The first that is not OK, or OK.
inline absl::Status FirstError(const std::vector<absl::Status>& statuses) {
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace emberd::server
