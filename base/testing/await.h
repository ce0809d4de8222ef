// Waits for what others do in their own time: a test asks until it is so, and never sleeps instead.
#pragma once

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace emberd {

// Only a failure takes so long, however busy the machine is.
inline constexpr absl::Duration kPatience = absl::Minutes(2);

// Asks until `done()` is true; false if it never was.
template <typename Condition>
bool Eventually(const Condition& done) {
  for (const absl::Time end = absl::Now() + kPatience; absl::Now() < end;) {
    if (done()) return true;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return done();
}

// Repeats a call until `done` is true of its result; gives the last one.
template <typename Call, typename Condition>
auto Await(const Call& call, const Condition& done) {
  auto result = call();
  for (const absl::Time end = absl::Now() + kPatience; !done(result) && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(100));
    result = call();
  }
  return result;
}

// The same until it succeeds, as while a shard comes back: of a Status or a StatusOr.
template <typename Call>
auto Await(const Call& call) {
  return Await(call, [](const auto& result) { return result.ok(); });
}

}  // namespace emberd
