#include "base/elastic_pool.h"

#include <atomic>

#include <gtest/gtest.h>

#include "absl/synchronization/barrier.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

namespace emberd {
namespace {

TEST(ElasticPoolTest, EveryTaskHasAThreadAtOnce) {
  ElasticPool pool(6);
  absl::BlockingCounter running(6);
  absl::Notification release;
  for (int i = 0; i < 3; ++i) {
    const auto task = [&] {
      running.DecrementCount();
      release.WaitForNotification();
    };
    EXPECT_TRUE(pool.SubmitPair(task, task));
  }
  running.Wait();  // all six wait at the same time
  EXPECT_FALSE(pool.SubmitPair([] {}, [] {}));
  release.Notify();
}

TEST(ElasticPoolTest, KeepsItsThreadsForLaterTasks) {
  ElasticPool pool(1000);
  for (int i = 0; i < 100; ++i) {
    absl::BlockingCounter done(2);
    const auto task = [&] { done.DecrementCount(); };
    ASSERT_TRUE(pool.SubmitPair(task, task));
    done.Wait();
    absl::SleepFor(absl::Microseconds(200));  // time for the threads to come back
  }
  EXPECT_LE(pool.threads(), 20);
}

TEST(ElasticPoolTest, DestructionWaitsForTasks) {
  std::atomic<int> ended = 0;
  {
    ElasticPool pool(2);
    const auto task = [&] {
      absl::SleepFor(absl::Milliseconds(20));
      ++ended;
    };
    EXPECT_TRUE(pool.SubmitPair(task, task));
  }
  EXPECT_EQ(ended, 2);
}

}  // namespace
}  // namespace emberd
