// What waits and expires goes by a clock that nobody sets. A failure here means that times are lost
// or shifted where they are handed to others.
#include "base/steady_time.h"

#include <thread>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace emberd {
namespace steady_time_test {

constexpr absl::Duration kNear = absl::Seconds(20);  // on a machine that is busy

TEST(SteadyTimeTest, BeginsAtTheDateAndNeverGoesBack) {
  EXPECT_LT(absl::AbsDuration(SteadyNow() - absl::Now()), kNear);
  absl::Time last = SteadyNow();
  for (int i = 0; i < 1000; ++i) {
    const absl::Time now = SteadyNow();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(SteadyTimeTest, GoesToTheSystemsClockAndBack) {
  const absl::Time time = SteadyNow() + absl::Hours(1);
  EXPECT_LT(absl::AbsDuration(FromSystemTime(ToSystemTime(time)) - time), kNear);
  EXPECT_LT(absl::AbsDuration(absl::FromChrono(ToSystemTime(time)) - absl::Now() - absl::Hours(1)),
            kNear);
}

TEST(SteadyTimeTest, ForeverStaysForever) {
  EXPECT_EQ(ToSystemTime(absl::InfiniteFuture()), std::chrono::system_clock::time_point::max());
  EXPECT_EQ(FromSystemTime(std::chrono::system_clock::time_point::max()), absl::InfiniteFuture());
  EXPECT_LT(ToSystemTime(absl::InfinitePast()), std::chrono::system_clock::now());
}

TEST(SteadyTimeTest, WaitsEndWithTheirTimeOrTheirEvent) {
  absl::Notification event;
  EXPECT_FALSE(AwaitSteadily(event, absl::Milliseconds(1)));
  EXPECT_FALSE(AwaitSteadily(event, -absl::InfiniteDuration()));
  std::thread other([&event] { event.Notify(); });
  EXPECT_TRUE(AwaitSteadily(event, absl::InfiniteDuration()));
  other.join();

  absl::Mutex mutex;
  bool done = false;
  absl::MutexLock lock(&mutex);
  EXPECT_FALSE(AwaitSteadily(&mutex, absl::Condition(&done), absl::Milliseconds(1)));
  done = true;
  EXPECT_TRUE(AwaitSteadily(&mutex, absl::Condition(&done), absl::InfiniteDuration()));

  absl::Mutex plain;
  absl::CondVar never;
  absl::MutexLock plain_lock(&plain);
  const absl::Time end = SteadyNow() + absl::Milliseconds(10);
  while (WaitSteadily(&never, &plain, end)) {
  }
  EXPECT_GE(SteadyNow(), end);
}

}  // namespace steady_time_test
}  // namespace emberd
