#include "base/steady_time.h"

#include "absl/time/clock.h"

namespace emberd {
namespace {

using std::chrono::steady_clock;
using std::chrono::system_clock;

struct Start {
  absl::Time date = absl::Now();  // a date
  steady_clock::time_point steady = steady_clock::now();
};

const Start& TheStart() {
  static const Start start;
  return start;
}

#ifdef NDEBUG
// Where Abseil is packaged as for debugging, it notes each lock of a mutex in a graph, which has
// one lock for all threads, and looks for cycles there. Mutexes of programs that are built with
// NDEBUG do not tell it when they go: another one at the same place may make a cycle that is none.
[[maybe_unused]] const bool looks_for_no_cycles = [] {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  return true;
}();
#endif

// Far away, but near enough to be added to any time of any clock.
constexpr absl::Duration kFar = absl::Hours(24 * 365 * 100);

}  // namespace

absl::Time SteadyNow() {
  const Start& start = TheStart();
  return start.date + absl::FromChrono(steady_clock::now() - start.steady);
}

system_clock::time_point ToSystemTime(absl::Time steady) {
  if (steady == absl::InfiniteFuture()) return system_clock::time_point::max();
  const absl::Duration left = std::clamp(steady - SteadyNow(), -kFar, kFar);
  const system_clock::time_point now = system_clock::now();  // a date
  return now + std::chrono::duration_cast<system_clock::duration>(absl::ToChronoNanoseconds(left));
}

absl::Time FromSystemTime(system_clock::time_point time) {
  if (time == system_clock::time_point::max()) return absl::InfiniteFuture();
  // Not absl::Now, which hears of a clock that was set up to two seconds late.
  const system_clock::time_point now = system_clock::now();  // a date
  return SteadyNow() + absl::FromChrono(time - now);
}

}  // namespace emberd
