#include "base/thread_pools.h"

#include <algorithm>
#include <array>
#include <system_error>
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
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    work_or_stop_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

void CpuPool::Submit(Job job) {
  auto* const submitted = new SubmittedJob{std::move(job)};
  absl::MutexLock lock(&mutex_);
  jobs_.push_back(submitted);
  jobs_wait_.store(true, std::memory_order_relaxed);
  Wake(submitted->job.chunks);
}

void CpuPool::ParallelFor(int64_t tasks, absl::FunctionRef<void(int64_t)> task) {
  Loop loop{task, tasks};
  const int64_t helpers = runs_loops_alone ? 0 : std::min<int64_t>(tasks, threads()) - 1;
  if (helpers > 0) {
    absl::MutexLock lock(&mutex_);
    loop.after = loops_;
    loops_ = &loop;
    Wake(helpers);
  }
  for (int64_t i; (i = loop.next.fetch_add(1, std::memory_order_relaxed)) < tasks;) task(i);
  if (helpers <= 0) return;
  absl::MutexLock lock(&mutex_);
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
  absl::MutexLock lock(&mutex_);
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

// A job on its way. Finish deletes it.
struct Strand::Work {
  Job job;
  int waiting = 0;  // strands that have not let it in; guarded by the executor's mutex
};

Executor::~Executor() {
  absl::MutexLock lock(&mutex_);
  while (unfinished_ > 0) all_finished_.Wait(&mutex_);
}

void Executor::Submit(std::vector<Job> jobs) {
  std::vector<std::unique_ptr<Work>> works;
  for (Job& job : jobs) {
    works.push_back(std::make_unique<Work>());
    works.back()->job = std::move(job);
  }
  Works here;
  {
    absl::MutexLock lock(&mutex_);
    for (std::unique_ptr<Work>& work : works) Enqueue(std::move(work), &here);
  }
  for (Work* work : here) {
    for (int chunk = 0; chunk < work->job.chunks; ++chunk) work->job.run(chunk);
    Finish(work);
  }
}

void Executor::Enqueue(std::unique_ptr<Work> work, Works* here) {
  ++unfinished_;
  Work* w = work.release();
  w->waiting = static_cast<int>(w->job.strands.size());
  for (Strand* strand : w->job.strands) strand->line_.push_back({w, false});
  if (w->waiting == 0) MakeReady(w, here);
  for (Strand* strand : w->job.strands) Grant(*strand, here);
}

void Executor::Grant(Strand& strand, Works* here) {
  bool readers_only = true;
  for (Strand::Entry& entry : strand.line_) {
    const bool first = &entry == &strand.line_.front();
    const bool reader = entry.work->job.mode == Job::Mode::kRead;
    if (!first && !(readers_only && reader)) return;
    readers_only = readers_only && reader;
    if (entry.granted) continue;
    entry.granted = true;
    if (--entry.work->waiting == 0) MakeReady(entry.work, here);
  }
}

void Executor::LeaveLines(Work& work) {
  for (Strand* strand : work.job.strands) {
    std::deque<Strand::Entry>& line = strand->line_;
    line.erase(std::find_if(line.begin(), line.end(),
                            [&](const Strand::Entry& entry) { return entry.work == &work; }));
    Grant(*strand, nullptr);
  }
}

void Executor::MakeReady(Work* work, Works* here) {
  if (here != nullptr && work->job.tiny) {
    here->push_back(work);
    return;
  }
  queued_ += work->job.chunks;
  const auto run = [this, work](int chunk) {
    --queued_;
    work->job.run(chunk);
  };
  cpu_->Submit({work->job.chunks, run, [this, work] { Finish(work); }});
}

void Executor::Finish(Work* work) {
  {
    absl::MutexLock lock(&mutex_);
    LeaveLines(*work);
  }
  if (work->job.done) work->job.done();
  delete work;  // may free what the job kept alive: not under the mutex
  absl::MutexLock lock(&mutex_);
  if (--unfinished_ == 0) all_finished_.SignalAll();
}

BlockingPool::~BlockingPool() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    work_or_stop_.SignalAll();
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

bool BlockingPool::RunAll(absl::Span<std::function<void()>> tasks) {
  absl::MutexLock lock(&mutex_);
  try {
    // Threads first: if one cannot be had, nothing is queued.
    for (int idle = std::max(idle_ - static_cast<int>(tasks_.size()), 0);
         idle < static_cast<int>(tasks.size()); ++idle) {
      threads_.emplace_back([this] { Work(); });
    }
  } catch (const std::system_error&) {
    return false;
  }
  for (std::function<void()>& task : tasks) {
    tasks_.push_back(std::move(task));
    work_or_stop_.Signal();
  }
  return true;
}

void BlockingPool::RunEach(int count, absl::FunctionRef<void(int)> call) {
  absl::Mutex mutex;
  absl::CondVar all_done;
  int left = count - 1;
  for (int i = 1; i < count; ++i) {
    const auto run = [&, i] {
      call(i);
      absl::MutexLock lock(&mutex);
      if (--left == 0) all_done.Signal();
    };
    if (!Run(run)) run();
  }
  if (count > 0) call(0);
  absl::MutexLock lock(&mutex);
  while (left > 0) all_done.Wait(&mutex);
}

int BlockingPool::threads() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(threads_.size());
}

int BlockingPool::idle() const {
  absl::MutexLock lock(&mutex_);
  return idle_ - static_cast<int>(tasks_.size());
}

void BlockingPool::Work() {
  absl::MutexLock lock(&mutex_);
  while (true) {
    if (!tasks_.empty()) {
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      mutex_.Unlock();
      task();
      task = nullptr;
      mutex_.Lock();
    } else if (stopping_) {
      return;
    } else {
      ++idle_;
      work_or_stop_.Wait(&mutex_);
      --idle_;
    }
  }
}

TaskQueue::TaskQueue(BlockingPool* pool, int max_running, int max_queued,
                     std::function<void(int)> on_queued)
    : pool_(pool),
      max_running_(max_running),
      max_queued_(max_queued),
      on_queued_(std::move(on_queued)) {}

TaskQueue::~TaskQueue() {
  absl::MutexLock lock(&mutex_);
  while (running_ > 0) none_runs_.Wait(&mutex_);
}

absl::Status TaskQueue::Submit(std::function<void()> task, Text full) {
  absl::MutexLock lock(&mutex_);
  if (running_ < max_running_) return Start(absl::MakeSpan(&task, 1));
  if (static_cast<int>(queue_.size()) >= max_queued_) return absl::ResourceExhaustedError(full());
  queue_.push_back(std::move(task));
  TellQueued();
  return absl::OkStatus();
}

absl::Status TaskQueue::SubmitPair(std::function<void()> first, std::function<void()> second,
                                   Text full) {
  absl::MutexLock lock(&mutex_);
  if (running_ + 2 > max_running_) return absl::ResourceExhaustedError(full());
  std::array<std::function<void()>, 2> pair = {std::move(first), std::move(second)};
  return Start(absl::MakeSpan(pair));
}

absl::Status TaskQueue::Start(absl::Span<std::function<void()>> tasks) {
  for (std::function<void()>& task : tasks) {
    task = [this, task = std::move(task)]() mutable {
      while (task != nullptr) {
        task();
        task = nullptr;
        task = Next();
      }
    };
  }
  if (!pool_->RunAll(tasks)) {
    return absl::ResourceExhaustedError(
        "the process can have no more threads; retry later, or allow it more (`ulimit -u`, or the "
        "limit of its container)");
  }
  running_ += static_cast<int>(tasks.size());
  return absl::OkStatus();
}

std::function<void()> TaskQueue::Next() {
  absl::MutexLock lock(&mutex_);
  if (queue_.empty()) {
    if (--running_ == 0) none_runs_.SignalAll();
    return nullptr;
  }
  std::function<void()> task = std::move(queue_.front());
  queue_.pop_front();
  TellQueued();
  return task;
}

int TaskQueue::queued() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(queue_.size());
}

int TaskQueue::tasks() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(queue_.size()) + running_;
}

absl::Duration TaskQueue::ExpectedTime() const {
  absl::MutexLock lock(&mutex_);
  return mean_share_ * (static_cast<int64_t>(queue_.size()) + running_ + 1);
}

absl::Duration TaskQueue::ExpectedRunTime() const {
  absl::MutexLock lock(&mutex_);
  return mean_share_ * static_cast<int64_t>(running_);
}

void TaskQueue::RecordDuration(absl::Duration took) {
  constexpr double kWeight = 1.0 / 16;
  absl::MutexLock lock(&mutex_);
  mean_share_ += (took / std::max(running_, 1) - mean_share_) * kWeight;
}

void TaskQueue::TellQueued() {
  if (on_queued_ != nullptr) on_queued_(static_cast<int>(queue_.size()));
}

}  // namespace emberd
