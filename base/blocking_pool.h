// A fixed set of threads for work that may block, so that gRPC's own threads never do.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace emberd {

// Thread-safe.
class BlockingPool {
 public:
  // `max_queued`: tasks that may wait for a thread. `on_queued`, if given, hears how many do,
  // whenever that changes; it must be quick.
  BlockingPool(int threads, int max_queued, std::function<void(int queued)> on_queued = nullptr);
  // Runs what is queued, then stops.
  ~BlockingPool();
  BlockingPool(const BlockingPool&) = delete;
  BlockingPool& operator=(const BlockingPool&) = delete;

  // False, and nothing is done, if max_queued tasks are waiting already.
  [[nodiscard]] bool Submit(std::function<void()> task);
  int max_queued() const { return max_queued_; }
  // Tasks that wait for a thread.
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
  void Work();
  void TellQueued() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int max_queued_;
  const std::function<void(int)> on_queued_;
  mutable absl::Mutex mutex_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  // What one task of late has kept the others waiting: its duration over the tasks that ran beside
  // it.
  absl::Duration mean_share_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace emberd
