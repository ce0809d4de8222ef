// Runs a short task again and again on a thread of its own.
#pragma once

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace emberd {

class PeriodicTask {
 public:
  // Waits for `period` before each run.
  PeriodicTask(absl::Duration period, std::function<void()> task);
  // Waits for a run in progress.
  ~PeriodicTask();

  // The next run comes now, or once the one in progress has ended. Does not wait.
  void RunSoon();

 private:
  absl::Mutex mutex_;
  bool due_ ABSL_GUARDED_BY(mutex_) = false;  // nobody waits any more
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace emberd
