// Time that nobody sets. The system's clock may jump, by hours; what waits, expires or measures
// must not notice.
#pragma once

#include <chrono>

#include "absl/time/time.h"

namespace emberd {

// For every time-out, expiry and duration within this process. It begins as the date at which the
// process asked first, and goes on by the steady clock: so it is not a date to store, show or send.
absl::Time SteadyNow();

// When the system's clock will show that time, as it goes now: for gRPC, which counts at once by a
// steady clock, and for dates.
std::chrono::system_clock::time_point ToSystemTime(absl::Time steady);
// The other way round.
absl::Time FromSystemTime(std::chrono::system_clock::time_point time);

}  // namespace emberd
