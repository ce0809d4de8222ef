#include "base/cpu_pool.h"

#include <algorithm>
#include <utility>

namespace emberd {
namespace {

thread_local bool runs_loops_alone = false;

}  // namespace

CpuPool::Alone::Alone(bool tiny) : before_(runs_loops_alone) { runs_loops_alone |= tiny; }
CpuPool::Alone::~Alone() { runs_loops_alone = before_; }

CpuPool::CpuPool(int threads) : threads_(std::max(threads, 1)) {
  for (std::thread& thread : threads_) thread = std::thread([this] { Work(); });
}

CpuPool::~CpuPool() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    work_or_stop_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

void CpuPool::Submit(Job job) {
  auto* const submitted = new SubmittedJob{std::move(job)};
  MutexLock lock(&mutex_);
  jobs_.push_back(submitted);
  jobs_wait_.store(true, std::memory_order_relaxed);
  Wake(submitted->job.chunks);
}

void CpuPool::ParallelFor(int64_t tasks, absl::FunctionRef<void(int64_t)> task) {
  Loop loop{task, tasks};
  const int64_t helpers = runs_loops_alone ? 0 : std::min<int64_t>(tasks, threads()) - 1;
  if (helpers > 0) {
    MutexLock lock(&mutex_);
    loop.after = loops_;
    loops_ = &loop;
    Wake(helpers);
  }
  for (int64_t i; (i = loop.next.fetch_add(1, std::memory_order_relaxed)) < tasks;) task(i);
  if (helpers <= 0) return;
  MutexLock lock(&mutex_);
  Loop** link = &loops_;
  while (*link != &loop) link = &(*link)->after;
  *link = loop.after;
  while (loop.helpers > 0) loop.helper_left.Wait(&mutex_);
}

void CpuPool::Wake(int64_t threads) {
  for (int64_t i = std::min<int64_t>(threads, idle_); i > 0; --i) work_or_stop_.Signal();
}

CpuPool::Loop* CpuPool::FirstThatNeedsHelp() {
  for (Loop* loop = loops_; loop != nullptr; loop = loop->after) {
    if (loop->helpers < threads() - 1 && loop->next.load(std::memory_order_relaxed) < loop->tasks) {
      return loop;
    }
  }
  return nullptr;
}

void CpuPool::Work() {
  MutexLock lock(&mutex_);
  while (true) {
    if (!jobs_.empty()) {
      RunChunk();
    } else if (Loop* loop = FirstThatNeedsHelp(); loop != nullptr) {
      Help(loop);
    } else if (stopping_) {
      return;
    } else {
      ++idle_;
      work_or_stop_.Wait(&mutex_);
      --idle_;
    }
  }
}

void CpuPool::RunChunk() {
  SubmittedJob* const job = jobs_.front();
  const int chunk = job->begun++;
  if (job->begun == job->job.chunks) {
    jobs_.pop_front();
    jobs_wait_.store(!jobs_.empty(), std::memory_order_relaxed);
  }
  mutex_.Unlock();
  job->job.run(chunk);
  mutex_.Lock();
  if (++job->ended < job->job.chunks) return;
  mutex_.Unlock();
  if (job->job.done) job->job.done();
  delete job;  // may free what the job kept alive: not under the mutex
  mutex_.Lock();
}

void CpuPool::Help(Loop* loop) {
  ++loop->helpers;
  mutex_.Unlock();
  while (!jobs_wait_.load(std::memory_order_relaxed)) {
    const int64_t i = loop->next.fetch_add(1, std::memory_order_relaxed);
    if (i >= loop->tasks) break;
    loop->task(i);
  }
  mutex_.Lock();
  if (--loop->helpers == 0) loop->helper_left.Signal();
}

}  // namespace emberd
