#include <atomic>
#include <latch>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <pthread.h>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "base/thread_pools.h"

namespace emberd {
namespace blocking_pool_test {

// A thread that has run a task needs a moment until it is free.
void AwaitIdle(const BlockingPool& pool) {
  while (pool.idle() < pool.threads()) absl::SleepFor(absl::Microseconds(50));
}

TEST(BlockingPoolTest, EveryTaskHasAThreadAtOnceAndThreadsAreKept) {
  BlockingPool pool;
  for (int round = 0; round < 20; ++round) {
    std::latch all_six(6);
    for (int i = 0; i < 6; ++i) ASSERT_TRUE(pool.Run([&] { all_six.arrive_and_wait(); }));
    all_six.wait();
    AwaitIdle(pool);
    EXPECT_EQ(pool.threads(), 6);
  }
}

TEST(BlockingPoolTest, CallsEachAtTheSameTime) {
  BlockingPool pool;
  for (int count : {0, 1, 5}) {
    std::vector<int> calls(count);
    std::latch together(count);
    pool.RunEach(count, [&](int i) {
      ++calls[i];
      together.arrive_and_wait();
    });
    EXPECT_EQ(calls, std::vector<int>(count, 1));
  }
  EXPECT_LE(pool.threads(), 4);
}

TEST(BlockingPoolTest, DestructionWaitsForTasks) {
  std::atomic<int> ended = 0;
  {
    BlockingPool pool;
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(pool.Run([&] {
        absl::SleepFor(absl::Milliseconds(20));
        ++ended;
      }));
    }
  }
  EXPECT_EQ(ended, 2);
}

// What a TaskQueue says of itself when it takes no more.
std::string Full() { return "2 tasks wait already"; }

// While it lives, no thread can begin: each wants more stack than there are addresses.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge = before_;
    pthread_attr_setstacksize(&huge, size_t{1} << 47);
    pthread_setattr_default_np(&huge);
  }
  ~NoThreads() { pthread_setattr_default_np(&before_); }

 private:
  pthread_attr_t before_;
};

TEST(BlockingPoolTest, RunsNothingLaterForWhichThereIsNoThread) {
  BlockingPool pool;
  std::atomic<int> ran = 0;
  {
    const NoThreads none;
    EXPECT_FALSE(pool.Run([&] { ran += 100; }));
    pool.RunEach(3, [&](int) { ++ran; });
    TaskQueue queue(&pool, 2, 2);
    const auto add = [&] { ran += 100; };
    for (const absl::Status& refused :
         {queue.Submit(add, Full), queue.SubmitPair(add, add, Full)}) {
      EXPECT_TRUE(absl::IsResourceExhausted(refused));
      EXPECT_TRUE(absl::StrContains(refused.message(), "no more threads")) << refused;
    }
    EXPECT_EQ(queue.tasks(), 0);
    // Would catch: another reason for what is refused after it.
    TaskQueue narrow(&pool, 1, 0);
    EXPECT_FALSE(narrow.Submit(add, Full).ok());
    EXPECT_EQ(narrow.SubmitPair(add, add, Full), absl::ResourceExhaustedError(Full()));
  }
  EXPECT_EQ(pool.threads(), 0);
  std::latch done(1);
  ASSERT_TRUE(pool.Run([&] { done.count_down(); }));
  done.wait();
  EXPECT_EQ(ran, 3);
}

TEST(TaskQueueTest, RunsEverythingBeforeItEnds) {
  BlockingPool pool;
  std::atomic<int> ran = 0, running = 0, too_many = 0;
  {
    TaskQueue queue(&pool, 3, 100);
    const auto task = [&] {
      if (++running > 3) ++too_many;
      absl::SleepFor(absl::Milliseconds(1));  // others come meanwhile
      --running;
      ++ran;
    };
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(queue.Submit(task, Full).ok());
  }
  EXPECT_EQ(ran, 100);
  EXPECT_EQ(too_many, 0);
}

TEST(TaskQueueTest, RefusesWhatItCannotHold) {
  std::latch release(1);
  BlockingPool pool;
  std::vector<int> queued;
  TaskQueue queue(&pool, 1, 2, [&](int now) { queued.push_back(now); });
  ASSERT_TRUE(queue.Submit([&] { release.wait(); }, Full).ok());
  EXPECT_TRUE(queue.Submit([] {}, Full).ok());
  EXPECT_TRUE(queue.Submit([] {}, Full).ok());
  EXPECT_EQ(queue.Submit([] {}, Full), absl::ResourceExhaustedError(Full()));
  EXPECT_EQ(queue.SubmitPair([] {}, [] {}, Full), absl::ResourceExhaustedError(Full()));
  EXPECT_EQ(queue.queued(), 2);
  EXPECT_EQ(queued, (std::vector<int>{1, 2}));
  release.count_down();
}

TEST(TaskQueueTest, PairsRunAtOnceOrNotAtAll) {
  BlockingPool pool;
  std::latch release(1);
  TaskQueue queue(&pool, 5, 0);
  std::latch running(4);
  const auto task = [&] {
    running.count_down();
    release.wait();
  };
  EXPECT_TRUE(queue.SubmitPair(task, task, Full).ok());
  EXPECT_TRUE(queue.SubmitPair(task, task, Full).ok());
  EXPECT_FALSE(queue.SubmitPair(task, task, Full).ok()) << "there is room for one";
  running.wait();  // all four run at the same time
  release.count_down();
}

TEST(TaskQueueTest, ForetellsTheTimeFromWhatIsThereAndWhatTasksTook) {
  std::latch release(1);
  BlockingPool pool;
  TaskQueue queue(&pool, 2, 100);
  EXPECT_EQ(queue.ExpectedTime(), absl::ZeroDuration());
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(queue.Submit([&] { release.wait(); }, Full).ok());
  }
  // Two seconds beside another one: a task a second.
  for (int i = 0; i < 1000; ++i) queue.RecordDuration(absl::Seconds(2));
  EXPECT_EQ(queue.tasks(), 2);
  EXPECT_NEAR(absl::ToDoubleSeconds(queue.ExpectedTime()), 3, 0.01);
  EXPECT_NEAR(absl::ToDoubleSeconds(queue.ExpectedRunTime()), 2, 0.01);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(queue.Submit([] {}, Full).ok());
  EXPECT_EQ(queue.queued(), 20);
  EXPECT_NEAR(absl::ToDoubleSeconds(queue.ExpectedTime()), 23, 0.1);
  release.count_down();
}

}  // namespace blocking_pool_test
}  // namespace emberd
