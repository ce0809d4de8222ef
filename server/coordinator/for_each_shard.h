// The same call to several shards at once.
#pragma once

#include <thread>
#include <vector>

#include "absl/status/status.h"

namespace emberd::server {

// Runs call(i) for every i in `shards` in parallel and waits; statuses come in the order of
// `shards`. Threads of their own: these calls are rare (declarations, row access) and block on the
// network.
template <typename Call>
std::vector<absl::Status> ForEachShard(const std::vector<int>& shards, const Call& call) {
  std::vector<absl::Status> statuses(shards.size());
  std::vector<std::thread> threads;
  for (size_t i = 1; i < shards.size(); ++i) {
    threads.emplace_back([&, i] { statuses[i] = call(shards[i]); });
  }
  if (!shards.empty()) statuses[0] = call(shards[0]);
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

// The first that is not OK, or OK.
inline absl::Status FirstError(const std::vector<absl::Status>& statuses) {
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace emberd::server
