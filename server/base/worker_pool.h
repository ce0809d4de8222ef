// A fixed set of threads for work that may block, so that gRPC's own threads never do.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace emberd::server {

// Thread-safe.
class WorkerPool {
 public:
  // `max_queued`: tasks that may wait for a thread. `on_queued`, if given, hears how many do,
  // whenever that changes; it must be quick.
  WorkerPool(int threads, int max_queued, std::function<void(int queued)> on_queued = nullptr);
  // Runs what is queued, then stops.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // False, and nothing is done, if max_queued tasks are waiting already.
  [[nodiscard]] bool Submit(std::function<void()> task);
  int max_queued() const { return max_queued_; }
  // Tasks that wait for a thread.
  int queued() const;
  // What tasks of late have taken.
  absl::Duration MeanDuration() const;
  // How long a task submitted now would wait for a thread, at that rate.
  absl::Duration ExpectedWait() const;
  // Of a task that is over. Those that were given up at once are not told: they would make the
  // others look short.
  void RecordDuration(absl::Duration took);

 private:
  void Work();
  void TellQueued() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int max_queued_;
  const std::function<void(int)> on_queued_;
  mutable absl::Mutex mutex_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Duration mean_duration_ ABSL_GUARDED_BY(mutex_);  // of the last tasks, weighted
  std::vector<std::thread> threads_;
};

}  // namespace emberd::server
