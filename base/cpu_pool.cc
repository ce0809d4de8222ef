#include "base/cpu_pool.h"

namespace emberd {

CpuPool::CpuPool(int threads) {
  for (int i = 1; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

CpuPool::~CpuPool() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    work_or_stop_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

void CpuPool::Run(Job* job) {
  for (int64_t i; (i = job->next.fetch_add(1, std::memory_order_relaxed)) < job->tasks;)
    job->task(i);
}

void CpuPool::ParallelFor(int64_t tasks, absl::FunctionRef<void(int64_t)> task) {
  if (threads_.empty() || tasks <= 1) {
    for (int64_t i = 0; i < tasks; ++i) task(i);
    return;
  }
  Job job{task, tasks};
  {
    MutexLock lock(&mutex_);
    job.after = jobs_;
    jobs_ = &job;
    work_or_stop_.SignalAll();
  }
  Run(&job);
  MutexLock lock(&mutex_);
  Job** link = &jobs_;
  while (*link != &job) link = &(*link)->after;
  *link = job.after;
  while (job.helpers > 0) helper_left_.Wait(&mutex_);
}

CpuPool::Job* CpuPool::FirstUnfinished() {
  for (Job* job = jobs_; job != nullptr; job = job->after) {
    if (job->next.load(std::memory_order_relaxed) < job->tasks) return job;
  }
  return nullptr;
}

void CpuPool::Work() {
  mutex_.Lock();
  while (true) {
    Job* job = FirstUnfinished();
    if (job == nullptr) {
      if (stopping_) break;
      work_or_stop_.Wait(&mutex_);
      continue;
    }
    ++job->helpers;
    mutex_.Unlock();
    Run(job);
    mutex_.Lock();
    if (--job->helpers == 0) helper_left_.SignalAll();
  }
  mutex_.Unlock();
}

}  // namespace emberd
