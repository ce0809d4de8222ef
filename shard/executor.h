// A fixed pool of threads, and the order in which work on partitions runs.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

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
  std::function<void()> done;  // after the last chunk, on a pool thread, strands already free
};

// Thread-safe. The destructor waits for all submitted jobs.
class Executor {
 public:
  explicit Executor(int threads);
  ~Executor();
  int threads() const { return static_cast<int>(threads_.size()); }
  // Chunks of jobs that hold their strands and wait for a thread.
  int queued() const;

  // Takes places in all lines at one moment: of two calls, one is first everywhere.
  void Submit(std::vector<Job> jobs);

  // Runs body(0) .. body(count - 1), on this thread and on idle ones of the pool; returns when all
  // are done. Waits for no other work.
  void ParallelFor(int count, const std::function<void(int)>& body);

 private:
  void Enqueue(std::unique_ptr<Work> work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LeaveLines(Work& work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Grant(Strand& strand) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MakeReady(Work* work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Loop();

  mutable Mutex mutex_;
  CondVar work_or_stop_;
  CondVar all_finished_;
  // Jobs that hold their strands and have chunks nobody took yet.
  std::deque<Work*> ready_ ABSL_GUARDED_BY(mutex_);
  int64_t unfinished_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace emberd::shard
