#include "base/periodic_task.h"

#include <atomic>

#include <gtest/gtest.h>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

namespace emberd {
namespace periodic_task_test {

TEST(PeriodicTaskTest, RunsAgainAndAgainAndStopsAtOnce) {
  std::atomic<int> runs = 0;
  absl::Notification three;
  {
    PeriodicTask task(absl::Milliseconds(1), [&] {
      if (++runs == 3) three.Notify();
    });
    three.WaitForNotification();
  }
  const int at_end = runs;
  EXPECT_EQ(runs, at_end);
  // A long period must not delay the end.
  const absl::Time start = absl::Now();
  {
    PeriodicTask sleepy(absl::Hours(1), [] {});
  }
  EXPECT_LT(absl::Now() - start, absl::Minutes(10));
}

}  // namespace periodic_task_test
}  // namespace emberd
