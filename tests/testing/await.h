// Waits for what only time brings back.
#pragma once

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace emberd::testing {

// Repeats a call until it succeeds, as while a shard comes back, for at least 30 seconds. Gives its
// last result, a Status or a StatusOr.
template <typename Call>
auto Await(const Call& call) {
  auto result = call();
  for (int i = 0; i < 300 && !result.ok(); ++i) {
    absl::SleepFor(absl::Milliseconds(100));
    result = call();
  }
  return result;
}

}  // namespace emberd::testing
