// The order in which work on partitions runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "base/thread_pools.h"

namespace emberd::shard {

class Executor;
struct Work;

// The place in line of one partition of one stack. Work runs in order of submission, except that
// neighbouring readers share: a reader waits for the writers before it, a writer for everything
// before it. Must outlive its work.
class Strand {
 private:
  friend class Executor;
  struct Entry {
    Work* work;
    bool granted;
  };
  std::deque<Entry> line_;  // guarded by the executor's mutex
};

// What Submit takes. The chunks of a job may run in parallel and in any order, all of them while
// the job holds its strands.
struct Job {
  enum class Mode { kRead, kWrite };
  std::vector<Strand*> strands;  // none: runs at once
  Mode mode = Mode::kRead;
  int chunks = 1;  // >= 1
  std::function<void(int chunk)> run;
  std::function<void()> done;  // after the last chunk, on its thread, strands already free
  // So little that to wake a thread takes longer: where nothing is before it in line, it runs on
  // the thread that submits it.
  bool tiny = false;
};

// Thread-safe. The destructor waits for all submitted jobs.
class Executor {
 public:
  // Jobs run on `cpu`, which must outlive the executor.
  explicit Executor(CpuPool* cpu) : cpu_(cpu) {}
  ~Executor();
  // Chunks of jobs that hold their strands and wait for a thread.
  int queued() const { return queued_; }

  // Takes places in all lines at one moment: of two calls, one is first everywhere. Tiny jobs may
  // be done when it returns.
  void Submit(std::vector<Job> jobs);

 private:
  // `here`: gets what is tiny and ready, for the caller to run without the mutex. Null: the pool
  // runs it.
  using Works = std::vector<Work*>;
  void Enqueue(std::unique_ptr<Work> work, Works* here) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LeaveLines(Work& work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Grant(Strand& strand, Works* here) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MakeReady(Work* work, Works* here) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Finish(Work* work);

  CpuPool* const cpu_;
  std::atomic<int> queued_{0};
  Mutex mutex_;
  CondVar all_finished_;
  int64_t unfinished_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace emberd::shard
