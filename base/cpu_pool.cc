#include "base/cpu_pool.h"

namespace emberd {

CpuPool::CpuPool(int threads) {
  for (int i = 1; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

CpuPool::~CpuPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    work_or_stop_.notify_all();
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
    std::lock_guard<std::mutex> lock(mutex_);
    job.after = jobs_;
    jobs_ = &job;
    work_or_stop_.notify_all();
  }
  Run(&job);
  std::unique_lock<std::mutex> lock(mutex_);
  Job** link = &jobs_;
  while (*link != &job) link = &(*link)->after;
  *link = job.after;
  while (job.helpers > 0) helper_left_.wait(lock);
}

CpuPool::Job* CpuPool::FirstUnfinished() {
  for (Job* job = jobs_; job != nullptr; job = job->after) {
    if (job->next.load(std::memory_order_relaxed) < job->tasks) return job;
  }
  return nullptr;
}

void CpuPool::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    Job* job = FirstUnfinished();
    if (job == nullptr) {
      if (stopping_) return;
      work_or_stop_.wait(lock);
      continue;
    }
    ++job->helpers;
    lock.unlock();
    Run(job);
    lock.lock();
    if (--job->helpers == 0) helper_left_.notify_all();
  }
}

}  // namespace emberd
