#include "base/periodic_task.h"

#include <atomic>

#include <gtest/gtest.h>

#include "absl/synchronization/notification.h"

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
  PeriodicTask sleepy(absl::Hours(1), [] {});  // its end does not wait for its next run
}

TEST(PeriodicTaskTest, CanBeWoken) {
  absl::Notification ran;
  PeriodicTask task(absl::InfiniteDuration(), [&] { ran.Notify(); });
  task.RunSoon();
  ran.WaitForNotification();
}

}  // namespace periodic_task_test
}  // namespace emberd
