// The threads of a process that may block: on the network, on other trainers, on a lock. Whoever
// has such work takes its threads from one BlockingPool, and keeps it in bounds with a TaskQueue.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/cpu_pool.h"
#include "base/mutex.h"

namespace emberd {

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
  // Calls call(0) to call(count - 1) at the same time, the first, and those for which no thread can
  // be had, on the caller's thread; returns when all are done.
  void RunEach(int count, absl::FunctionRef<void(int)> call);

  int threads() const;
  // Threads without a task.
  int idle() const;

 private:
  void Work();

  mutable Mutex mutex_;
  CondVar work_or_stop_;
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
  // RESOURCE_EXHAUSTED, and nothing is done, if max_queued tasks wait already, which is what `full`
  // says, or if no thread can be had.
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
  // Of a task that is about to end. Those that are given up at once are not told: they would make
  // the others look short.
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
  mutable Mutex mutex_;
  CondVar none_runs_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  // What one task of late has kept the others waiting: its duration over the tasks that ran beside
  // it.
  absl::Duration mean_share_ ABSL_GUARDED_BY(mutex_);
};

// The two kinds of threads of a process. Made once, near main, and handed down to all who need
// them: their number does not grow with models, shards or clients.
struct ThreadPools {
  explicit ThreadPools(int cpu_threads) : cpu(cpu_threads) {}

  CpuPool cpu;            // for what computes
  BlockingPool blocking;  // for what waits
};

}  // namespace emberd
