#include <atomic>
#include <functional>
#include <future>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/testing/seed.h"
#include "base/thread_pools.h"

namespace emberd {
namespace executor_test {

Job MakeJob(std::vector<Strand*> strands, Job::Mode mode, std::function<void()> run) {
  Job job;
  job.strands = std::move(strands);
  job.mode = mode;
  job.run = [run = std::move(run)](int) { run(); };
  return job;
}

TEST(Executor, RunsEveryChunkOnceAndThenDone) {
  std::vector<std::atomic<int>> runs(100);
  std::promise<void> done;
  CpuPool cpu(3);
  Executor executor(&cpu);
  Job job;
  job.chunks = 100;
  job.run = [&](int chunk) { ++runs[chunk]; };
  job.done = [&] {
    for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 1);
    done.set_value();
  };
  executor.Submit({job});
  done.get_future().wait();
}

TEST(Executor, CountsWhatCouldRunButWaitsForAThread) {
  std::promise<void> started, release;
  const std::shared_future<void> released = release.get_future().share();
  Strand strand;
  CpuPool cpu(1);
  Executor executor(&cpu);
  executor.Submit({MakeJob({&strand}, Job::Mode::kWrite, [&] {
    started.set_value();
    released.wait();
  })});
  started.get_future().wait();
  EXPECT_EQ(executor.queued(), 0);
  executor.Submit({MakeJob({&strand}, Job::Mode::kWrite, [] {})});
  EXPECT_EQ(executor.queued(), 0) << "waits for its strand, not for a thread";
  Job chunks;
  chunks.chunks = 5;
  chunks.run = [](int) {};
  executor.Submit({chunks, MakeJob({}, Job::Mode::kRead, [] {})});
  EXPECT_EQ(executor.queued(), 6);
  release.set_value();
}

TEST(Executor, ParallelForCoversTheRangeWhileTheExecutorIsBusy) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  CpuPool cpu(2);
  Executor executor(&cpu);
  Job block;
  block.chunks = 2;
  block.run = [&](int) { released.wait(); };
  executor.Submit({block});
  std::vector<std::atomic<int>> runs(1000);
  cpu.ParallelFor(1000, [&](int i) { ++runs[i]; });  // nobody else is free
  for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 1);
  cpu.ParallelFor(0, [&](int) { ADD_FAILURE(); });
  release.set_value();
}

Job TinyJob(Strand* strand, std::function<void()> run, std::function<void()> done) {
  Job job = MakeJob({strand}, Job::Mode::kRead, std::move(run));
  job.tiny = true;
  job.done = std::move(done);
  return job;
}

TEST(Executor, RunsATinyJobOnTheThreadThatSubmitsIt) {
  Strand strand;
  CpuPool cpu(2);
  Executor executor(&cpu);
  std::thread::id ran, ended;
  Job job = TinyJob(
      &strand, [&] { ran = std::this_thread::get_id(); },
      [&] { ended = std::this_thread::get_id(); });
  job.chunks = 2;
  executor.Submit({job});
  EXPECT_EQ(ran, std::this_thread::get_id());
  EXPECT_EQ(ended, std::this_thread::get_id());
}

// Prevents: a tiny read that overtakes the update before it, or one that makes its caller wait for
// that update.
TEST(Executor, ATinyJobKeepsItsPlaceInLine) {
  std::promise<void> release, read;
  const std::shared_future<void> released = release.get_future().share();
  std::atomic<bool> written{false};
  Strand strand;
  CpuPool cpu(2);
  Executor executor(&cpu);
  executor.Submit({MakeJob({&strand}, Job::Mode::kWrite, [&] {
    released.wait();
    written = true;
  })});
  executor.Submit({TinyJob(
      &strand, [&] { EXPECT_TRUE(written); }, [&] { read.set_value(); })});
  release.set_value();
  read.get_future().wait();
}

// Two readers that wait for one another: each can only finish if both are let in.
TEST(Executor, NeighbouringReadersShare) {
  std::atomic<int> inside{0};
  Strand strand;
  CpuPool cpu(2);
  Executor executor(&cpu);
  const auto read = [&] {
    ++inside;
    while (inside.load() < 2) std::this_thread::yield();
  };
  executor.Submit(
      {MakeJob({&strand}, Job::Mode::kRead, read), MakeJob({&strand}, Job::Mode::kRead, read)});
}

// Prevents: a reader that overtakes a writer or runs beside one, two writers at once, and requests
// that see one another's work in one partition but not in another.
TEST(Executor, KeepsTheOrderOfSubmissionOnEveryStrand) {
  std::mt19937_64 random(TestSeed());
  constexpr int kStrands = 4, kJobs = 400;
  struct Cell {
    std::atomic<int> readers{0}, writers{0};
    int version = 0;
  };
  std::vector<Cell> cells(kStrands);
  std::vector<int> versions(kStrands);  // as they must be when the next job runs
  Strand strands[kStrands];
  CpuPool cpu(4);
  Executor executor(&cpu);
  for (int i = 0; i < kJobs; ++i) {
    std::vector<int> mine;
    for (int s = 0; s < kStrands; ++s) {
      if (random() % 2) mine.push_back(s);
    }
    std::vector<Strand*> taken;
    for (const int s : mine) taken.push_back(&strands[s]);
    const bool write = random() % 3 == 0;
    const auto run = [&cells, mine, write, expected = versions] {
      for (const int s : mine) {
        EXPECT_EQ(cells[s].version, expected[s]);
        EXPECT_EQ(cells[s].writers, 0);
        EXPECT_TRUE(!write || cells[s].readers == 0);
        ++(write ? cells[s].writers : cells[s].readers);
      }
      std::this_thread::yield();
      for (const int s : mine) {
        --(write ? cells[s].writers : cells[s].readers);
        if (write) ++cells[s].version;
      }
    };
    if (write) {
      for (const int s : mine) ++versions[s];
    }
    executor.Submit({MakeJob(taken, write ? Job::Mode::kWrite : Job::Mode::kRead, run)});
  }
}

TEST(Executor, DestructorWaitsForWorkThatSubmitsMoreWork) {
  std::atomic<int> ran{0};
  std::function<void()> again;
  {
    CpuPool cpu(2);
    Executor executor(&cpu);
    again = [&] {
      if (++ran < 50) executor.Submit({MakeJob({}, Job::Mode::kRead, again)});
    };
    executor.Submit({MakeJob({}, Job::Mode::kRead, again)});
  }
  EXPECT_EQ(ran, 50);
}

}  // namespace executor_test
}  // namespace emberd
