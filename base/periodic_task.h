// Runs a short task again and again on a thread of its own.
#pragma once

#include <functional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/steady_time.h"

namespace emberd {

class PeriodicTask {
 public:
  // Waits for `period` before each run.
  PeriodicTask(absl::Duration period, std::function<void()> task)
      : thread_([this, period, task = std::move(task)] {
          while (WaitForNext(period)) task();
        }) {}
  // Waits for a run in progress.
  ~PeriodicTask() {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = due_ = true;
    }
    thread_.join();
  }

  // The next run comes now, or once the one in progress has ended. Does not wait.
  void RunSoon() {
    absl::MutexLock lock(&mutex_);
    due_ = true;
  }

 private:
  // False: there is none.
  bool WaitForNext(absl::Duration period) {
    absl::MutexLock lock(&mutex_);
    AwaitSteadily(&mutex_, absl::Condition(&due_), period);
    due_ = false;
    return !stopping_;
  }

  absl::Mutex mutex_;
  bool due_ ABSL_GUARDED_BY(mutex_) = false;  // nobody waits any more
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace emberd
