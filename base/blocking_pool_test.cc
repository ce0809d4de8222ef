#include "base/blocking_pool.h"

#include <atomic>

#include <gtest/gtest.h>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/periodic_task.h"

namespace emberd {
namespace {

TEST(WorkerPoolTest, RunsEverythingBeforeItStops) {
  std::atomic<int> ran = 0;
  {
    BlockingPool pool(3, 100);
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(pool.Submit([&] { ++ran; }));
  }
  EXPECT_EQ(ran, 100);
}

TEST(WorkerPoolTest, RefusesWhatItsQueueCannotHold) {
  absl::Notification started, release;
  BlockingPool pool(1, 2);
  ASSERT_TRUE(pool.Submit([&] {
    started.Notify();
    release.WaitForNotification();
  }));
  started.WaitForNotification();
  EXPECT_TRUE(pool.Submit([] {}));
  EXPECT_TRUE(pool.Submit([] {}));
  EXPECT_FALSE(pool.Submit([] {}));
  release.Notify();
}

TEST(WorkerPoolTest, ForetellsTheTimeFromWhatIsThereAndWhatTasksTook) {
  absl::Notification both, release;
  std::atomic<int> started = 0;
  BlockingPool pool(2, 100);
  EXPECT_EQ(pool.ExpectedTime(), absl::ZeroDuration());
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(pool.Submit([&] {
      if (++started == 2) both.Notify();
      release.WaitForNotification();
    }));
  }
  both.WaitForNotification();
  // Two seconds beside another one: a task a second.
  for (int i = 0; i < 1000; ++i) pool.RecordDuration(absl::Seconds(2));
  EXPECT_EQ(pool.tasks(), 2);
  EXPECT_NEAR(absl::ToDoubleSeconds(pool.ExpectedTime()), 3, 0.01);
  EXPECT_NEAR(absl::ToDoubleSeconds(pool.ExpectedRunTime()), 2, 0.01);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(pool.Submit([] {}));
  EXPECT_EQ(pool.queued(), 20);
  EXPECT_NEAR(absl::ToDoubleSeconds(pool.ExpectedTime()), 23, 0.1);
  release.Notify();
}

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

}  // namespace
}  // namespace emberd
