#include "base/periodic_task.h"

#include <utility>

#include "base/steady_time.h"

namespace emberd {

PeriodicTask::PeriodicTask(absl::Duration period, std::function<void()> task)
    : thread_([this, period, task = std::move(task)] {
        while (true) {
          {
            absl::MutexLock lock(&mutex_);
            AwaitSteadily(&mutex_, absl::Condition(&due_), period);
            if (stopping_) return;
            due_ = false;
          }
          task();
        }
      }) {}

PeriodicTask::~PeriodicTask() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = due_ = true;
  }
  thread_.join();
}

void PeriodicTask::RunSoon() {
  absl::MutexLock lock(&mutex_);
  due_ = true;
}

}  // namespace emberd
