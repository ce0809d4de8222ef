// The threads of a process that compute. One pool serves everybody: loops cut into tasks, and jobs
// in order of submission. What waits for a request or for the network belongs on a BlockingPool.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "base/mutex.h"

namespace emberd {

// Thread-safe. Jobs go before loops: a loop has its caller to work on it, a job has only the pool.
class CpuPool {
 public:
  // Starts `threads`, at least 1.
  explicit CpuPool(int threads);
  // Runs what was submitted, then stops.
  ~CpuPool();
  int threads() const { return static_cast<int>(threads_.size()); }

  // Calls task(0) to task(tasks - 1), each once, on the caller's thread and on idle ones of the
  // pool, at most threads() together; returns when all are done. Who runs which is left to chance.
  // May be called from any thread, one of the pool too: the caller runs whatever nobody else has
  // begun, so it never waits for a thread. Allocates nothing.
  void ParallelFor(int64_t tasks, absl::FunctionRef<void(int64_t)> task);

  // While one lives, its thread runs its loops alone: of tiny ones, to wake others costs many times
  // what they would save.
  class Alone {
   public:
    // Does nothing unless `tiny`.
    explicit Alone(bool tiny);
    ~Alone();
    Alone(const Alone&) = delete;
    Alone& operator=(const Alone&) = delete;

   private:
    const bool before_;
  };

  // The chunks of a job may run at the same time and in any order. Of several jobs, the first one's
  // chunks begin first.
  struct Job {
    int chunks = 1;  // >= 1
    std::function<void(int chunk)> run;
    std::function<void()> done;  // on the thread of the chunk that ends last; may be null
  };
  void Submit(Job job);

 private:
  struct SubmittedJob {
    Job job;
    int begun = 0;  // chunks
    int ended = 0;
  };
  // Lives on the stack of ParallelFor's caller.
  struct Loop {
    absl::FunctionRef<void(int64_t)> task;
    const int64_t tasks;
    std::atomic<int64_t> next{0};
    int helpers = 0;  // threads of the pool inside; guarded by mutex_
    CondVar helper_left{};
    Loop* after = nullptr;
  };

  void Work();
  void RunChunk() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Help(Loop* loop) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Loop* FirstThatNeedsHelp() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Wake(int64_t threads) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  CondVar work_or_stop_;
  // Those with chunks that nobody has begun. The thread that ends a job's last chunk deletes it.
  std::deque<SubmittedJob*> jobs_ ABSL_GUARDED_BY(mutex_);
  // As jobs_.empty(), for threads that work on a loop.
  std::atomic<bool> jobs_wait_{false};
  Loop* loops_ ABSL_GUARDED_BY(mutex_) = nullptr;  // newest first
  int idle_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;  // as many as the constructor starts
};

// Without a pool, everything runs on the caller's thread.
inline void ParallelFor(CpuPool* pool, int64_t tasks, absl::FunctionRef<void(int64_t)> task) {
  if (pool != nullptr) return pool->ParallelFor(tasks, task);
  for (int64_t i = 0; i < tasks; ++i) task(i);
}

}  // namespace emberd
