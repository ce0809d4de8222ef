#include "base/periodic_task.h"

#include <utility>

#include "base/steady_time.h"

namespace emberd {

PeriodicTask::PeriodicTask(absl::Duration period, std::function<void()> task)
    : thread_([this, period, task = std::move(task)] {
        while (true) {
          {
            absl::MutexLock lock(&mutex_);
            if (AwaitSteadily(&mutex_, absl::Condition(&stopping_), period)) return;
          }
          task();
        }
      }) {}

PeriodicTask::~PeriodicTask() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

}  // namespace emberd
