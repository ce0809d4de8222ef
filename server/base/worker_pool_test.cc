#include "server/base/worker_pool.h"

#include <atomic>

#include <gtest/gtest.h>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/base/periodic_task.h"

namespace emberd::server {
namespace {

TEST(WorkerPoolTest, RunsEverythingBeforeItStops) {
  std::atomic<int> ran = 0;
  {
    WorkerPool pool(3, 100);
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(pool.Submit([&] { ++ran; }));
  }
  EXPECT_EQ(ran, 100);
}

TEST(WorkerPoolTest, RefusesWhatItsQueueCannotHold) {
  absl::Notification started, release;
  WorkerPool pool(1, 2);
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

TEST(WorkerPoolTest, ForetellsTheWaitFromTheQueueAndWhatTasksTook) {
  absl::Notification started, release;
  WorkerPool pool(2, 100);
  EXPECT_EQ(pool.ExpectedWait(), absl::ZeroDuration());
  for (int i = 0; i < 1000; ++i) pool.RecordDuration(absl::Seconds(1));
  // Nobody waits where nothing is queued.
  EXPECT_EQ(pool.ExpectedWait(), absl::ZeroDuration());
  ASSERT_TRUE(pool.Submit([&] {
    started.Notify();
    release.WaitForNotification();
  }));
  ASSERT_TRUE(pool.Submit([&] { release.WaitForNotification(); }));
  started.WaitForNotification();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(pool.Submit([] {}));
  while (pool.queued() > 20) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_NEAR(absl::ToDoubleSeconds(pool.ExpectedWait()), 10, 0.1);
  release.Notify();
}

TEST(WorkerPoolTest, TellsHowManyWait) {
  absl::Notification started, release;
  std::atomic<int> told = -1;
  {
    WorkerPool pool(1, 10, [&](int queued) { told = queued; });
    ASSERT_TRUE(pool.Submit([&] {
      started.Notify();
      release.WaitForNotification();
    }));
    started.WaitForNotification();
    EXPECT_EQ(pool.queued(), 0);
    ASSERT_TRUE(pool.Submit([] {}));
    ASSERT_TRUE(pool.Submit([] {}));
    EXPECT_EQ(pool.queued(), 2);
    EXPECT_EQ(told, 2);
    release.Notify();
  }
  EXPECT_EQ(told, 0);
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
}  // namespace emberd::server
