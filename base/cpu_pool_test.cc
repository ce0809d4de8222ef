#include <atomic>
#include <latch>
#include <numeric>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/thread_pools.h"

namespace emberd {
namespace cpu_pool_test {

// Would catch: a task left out or run twice, or a return before all are done, with several callers
// at once.
TEST(CpuPoolTest, EveryTaskOfALoopRunsOnce) {
  for (int threads : {1, 2, 5}) {
    CpuPool pool(threads);
    std::vector<std::thread> callers;
    for (int c = 0; c < 3; ++c) {
      callers.emplace_back([&pool] {
        for (int round = 0; round < 200; ++round) {
          std::vector<std::atomic<int>> runs(round % 17);
          pool.ParallelFor(static_cast<int64_t>(runs.size()),
                           [&](int64_t i) { runs[i].fetch_add(1); });
          for (const auto& count : runs) ASSERT_EQ(count.load(), 1);
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
}

TEST(CpuPoolTest, ALoopUsesTheCallerAndThreads) {
  CpuPool pool(3);
  // Three tasks that wait for one another: all run at the same time, and no fourth could.
  std::latch together(3);
  pool.ParallelFor(3, [&](int64_t) { together.arrive_and_wait(); });
}

TEST(CpuPoolTest, ATinyLoopStaysOnItsThread) {
  CpuPool pool(3);
  const std::thread::id here = std::this_thread::get_id();
  const auto threads = [&] {
    std::vector<std::thread::id> ran(100);
    pool.ParallelFor(100, [&](int64_t i) { ran[i] = std::this_thread::get_id(); });
    return ran;
  };
  {
    const CpuPool::Alone alone(true);
    const CpuPool::Alone inner(false);  // does not call for help either
    for (int round = 0; round < 200; ++round) {
      EXPECT_EQ(threads(), std::vector<std::thread::id>(100, here));
    }
  }
  const CpuPool::Alone large(false);
  std::latch together(3);  // help comes again
  pool.ParallelFor(3, [&](int64_t) { together.arrive_and_wait(); });
}

TEST(CpuPoolTest, AJobRunsEveryChunkOnceAndThenItsEnd) {
  CpuPool pool(3);
  for (int chunks : {1, 2, 100}) {
    std::vector<std::atomic<int>> runs(chunks);
    std::latch done(1);
    pool.Submit({chunks, [&](int chunk) { ++runs[chunk]; },
                 [&] {
                   for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 1);
                   done.count_down();
                 }});
    done.wait();
  }
}

TEST(CpuPoolTest, JobsBeginInOrderOfSubmission) {
  std::vector<int> order;
  {
    CpuPool pool(1);
    for (int i = 0; i < 50; ++i) {
      pool.Submit({2, [&order, i](int chunk) { order.push_back(2 * i + chunk); }, nullptr});
    }
  }
  std::vector<int> expected(100);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
}

// Every thread of the pool runs a job that makes a loop: nobody is left to help.
TEST(CpuPoolTest, LoopsInsideOfJobsAndLoopsEnd) {
  std::atomic<int> runs = 0;
  {
    CpuPool pool(2);
    const auto loop = [&](int64_t) { pool.ParallelFor(10, [&](int64_t) { ++runs; }); };
    for (int i = 0; i < 20; ++i) pool.Submit({2, loop, nullptr});
    pool.ParallelFor(5, loop);
  }
  EXPECT_EQ(runs, (20 * 2 + 5) * 10);
}

// The only thread helps a loop of two callers whose tasks end only when the job has run.
TEST(CpuPoolTest, AJobDoesNotWaitForTheEndOfALoop) {
  CpuPool pool(2);
  std::latch job_ran(1);
  std::atomic<bool> submitted = false;
  std::atomic<int> tasks = 0;
  pool.ParallelFor(1000, [&](int64_t) {
    ++tasks;
    if (!submitted.exchange(true)) {
      pool.Submit({1, [&](int) { job_ran.count_down(); }, nullptr});
      job_ran.wait();  // holds the caller or a helper; the other one is free
    }
  });
  EXPECT_EQ(tasks, 1000);
}

TEST(CpuPoolTest, DestructionWaitsForJobsThatSubmitJobs) {
  std::atomic<int> ran = 0;
  std::function<void(int)> again;
  {
    CpuPool pool(2);
    again = [&](int) {
      if (++ran < 50) pool.Submit({1, again, nullptr});
    };
    pool.Submit({1, again, nullptr});
  }
  EXPECT_EQ(ran, 50);
}

}  // namespace cpu_pool_test
}  // namespace emberd
