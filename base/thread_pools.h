// The two kinds of threads of a process.
//
// Those of CpuPool compute. One pool serves everybody: loops cut into tasks, and jobs in order of
// submission; an Executor has jobs wait for those that were before them at the same data. Those of
// BlockingPool may block: on the network, on other trainers, on a lock. Whoever has such work takes
// its threads from one BlockingPool, and keeps it in bounds with a TaskQueue.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

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

  // While one lives, its thread runs its loops alone. For tiny loops, waking other threads costs
  // many times what these would save.
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
    absl::CondVar helper_left{};
    Loop* after = nullptr;
  };

  void Work();
  void RunChunk() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Help(Loop* loop) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Loop* FirstThatNeedsHelp() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Wake(int64_t threads) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Mutex mutex_;
  absl::CondVar work_or_stop_;
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

// The line of jobs on one piece of data. Jobs run in order of submission, except that neighbouring
// readers share: a reader waits for the writers before it, a writer for everything before it. Must
// outlive its jobs.
class Strand {
 private:
  friend class Executor;
  struct Work;
  struct Entry {
    Work* work;
    bool granted;
  };
  std::deque<Entry> line_;  // guarded by the executor's mutex
};

// A job in line. All its chunks run while it holds its strands; when `done` is called, these are
// free again.
struct Job : CpuPool::Job {
  enum class Mode { kRead, kWrite };
  std::vector<Strand*> strands;  // none: runs at once
  Mode mode = Mode::kRead;
  // So little that to wake a thread takes longer: where nothing is before it in line, it runs on
  // the thread that submits it.
  bool tiny = false;
};

// Runs jobs of a CpuPool in the order of their lines. Thread-safe. The destructor waits for all
// submitted jobs.
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
  using Work = Strand::Work;
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
  absl::Mutex mutex_;
  absl::CondVar all_finished_;
  int64_t unfinished_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Thread-safe. Every task has a thread at once; threads are kept for later tasks.
class BlockingPool {
 public:
  BlockingPool() = default;
  // Waits for all tasks. They must start no others by then.
  ~BlockingPool();

  // False, and nothing is done, if no thread can be had.
  [[nodiscard]] bool Run(std::function<void()> task) { return RunAll(absl::MakeSpan(&task, 1)); }
  // The same of all of them; takes them only if they will run.
  [[nodiscard]] bool RunAll(absl::Span<std::function<void()>> tasks);
  // Calls call(0) to call(count - 1) at the same time; returns when all are done. The first runs on
  // the caller's thread, and so do those for which no thread can be had.
  void RunEach(int count, absl::FunctionRef<void(int)> call);

  int threads() const;
  // Threads without a task.
  int idle() const;

 private:
  void Work();

  mutable absl::Mutex mutex_;
  absl::CondVar work_or_stop_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);  // each has a thread waking up
  int idle_ ABSL_GUARDED_BY(mutex_) = 0;                             // those that wake up count
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
};

// Tasks of one kind: so many run at a time, so many more wait for their turn. Thread-safe.
class TaskQueue {
 public:
  // `on_queued`, if given, hears how many tasks wait, whenever that changes; it must be quick.
  // `pool` must outlive the queue.
  TaskQueue(BlockingPool* pool, int max_running, int max_queued,
            std::function<void(int queued)> on_queued = nullptr);
  // Waits until everything submitted has run.
  ~TaskQueue();

  // What to say of a full queue; may ask it for max_queued() alone.
  using Text = absl::FunctionRef<std::string()>;
  // RESOURCE_EXHAUSTED, and nothing is done, if max_queued tasks wait already (`full` gives the
  // message), or if no thread can be had.
  absl::Status Submit(std::function<void()> task, Text full);
  // Both run at the same time, from now on; or neither, if not two more may run, or no threads can
  // be had.
  absl::Status SubmitPair(std::function<void()> first, std::function<void()> second, Text full);

  int max_queued() const { return max_queued_; }
  // Tasks that wait.
  int queued() const;
  // Tasks that wait or run.
  int tasks() const;
  // How long it would take until a task submitted now is done, at the rate at which tasks have
  // ended of late.
  absl::Duration ExpectedTime() const;
  // The same for a task that begins to run now.
  absl::Duration ExpectedRunTime() const;
  // How long a task that is about to end took. Not for tasks that are given up at once: they would
  // make the others look short.
  void RecordDuration(absl::Duration took);

 private:
  absl::Status Start(absl::Span<std::function<void()>> tasks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The one to run after a task has ended; null if none waits.
  std::function<void()> Next();
  void TellQueued() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  BlockingPool* const pool_;
  const int max_running_;
  const int max_queued_;
  const std::function<void(int)> on_queued_;
  mutable absl::Mutex mutex_;
  absl::CondVar none_runs_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  // For how long a task kept the others waiting, of late: its duration divided by the tasks that
  // ran beside it.
  absl::Duration mean_share_ ABSL_GUARDED_BY(mutex_);
};

// Made once, near main, and handed down to all who need them: their number does not grow with
// models, shards or clients.
struct ThreadPools {
  explicit ThreadPools(int cpu_threads) : cpu(cpu_threads) {}

  CpuPool cpu;            // for what computes
  BlockingPool blocking;  // for what waits
};

}  // namespace emberd
