// Time that nobody sets. The system's clock may jump, by hours; what waits, expires or measures
// must not notice. And waits that do not notice either.
#pragma once

#include <algorithm>
#include <chrono>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
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

// Abseil waits by the system's clock: if somebody sets that back by an hour, a wait takes an hour
// longer. A wait of no more than this is late by no more than this.
constexpr absl::Duration kLongestWait = absl::Seconds(1);

// Calls `wait` again and again, with a time of at most kLongestWait, until it returns true or
// `timeout` is over. Returns what it returned last.
template <typename Wait>
bool WaitSteadily(absl::Duration timeout, const Wait& wait) {
  const absl::Time end = SteadyNow() + timeout;
  while (true) {
    const absl::Duration left = end - SteadyNow();
    if (wait(std::clamp(left, absl::ZeroDuration(), kLongestWait))) return true;
    if (left <= kLongestWait && SteadyNow() >= end) return false;
  }
}

// As absl::Mutex::AwaitWithTimeout.
inline bool AwaitSteadily(absl::Mutex* mutex, const absl::Condition& condition,
                          absl::Duration timeout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
  return WaitSteadily(timeout, [&](absl::Duration time) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return mutex->AwaitWithTimeout(condition, time);
  });
}

// As absl::Notification::WaitForNotificationWithTimeout.
inline bool AwaitSteadily(const absl::Notification& notification, absl::Duration timeout) {
  return WaitSteadily(timeout, [&](absl::Duration time) {
    return notification.WaitForNotificationWithTimeout(time);
  });
}

// Until a signal, or `until` by SteadyNow; may return without either: wait in a loop. False: it is
// `until`.
inline bool WaitSteadily(absl::CondVar* condition, absl::Mutex* mutex, absl::Time until)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
  condition->WaitWithTimeout(mutex, std::min(until - SteadyNow(), kLongestWait));
  return SteadyNow() < until;
}

}  // namespace emberd
