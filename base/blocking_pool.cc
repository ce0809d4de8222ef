#include "base/blocking_pool.h"

#include <algorithm>
#include <array>
#include <system_error>
#include <utility>

namespace emberd {

BlockingPool::~BlockingPool() {
  std::vector<std::thread> threads;
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    work_or_stop_.SignalAll();
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

bool BlockingPool::RunAll(absl::Span<std::function<void()>> tasks) {
  MutexLock lock(&mutex_);
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
  Mutex mutex;
  CondVar all_done;
  int left = count - 1;
  for (int i = 1; i < count; ++i) {
    const auto run = [&, i] {
      call(i);
      MutexLock lock(&mutex);
      if (--left == 0) all_done.Signal();
    };
    if (!Run(run)) run();
  }
  if (count > 0) call(0);
  MutexLock lock(&mutex);
  while (left > 0) all_done.Wait(&mutex);
}

int BlockingPool::threads() const {
  MutexLock lock(&mutex_);
  return static_cast<int>(threads_.size());
}

int BlockingPool::idle() const {
  MutexLock lock(&mutex_);
  return idle_ - static_cast<int>(tasks_.size());
}

void BlockingPool::Work() {
  MutexLock lock(&mutex_);
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
  MutexLock lock(&mutex_);
  while (running_ > 0) none_runs_.Wait(&mutex_);
}

absl::Status TaskQueue::Submit(std::function<void()> task, Text full) {
  MutexLock lock(&mutex_);
  if (running_ < max_running_) return Start(absl::MakeSpan(&task, 1));
  if (static_cast<int>(queue_.size()) >= max_queued_) return absl::ResourceExhaustedError(full());
  queue_.push_back(std::move(task));
  TellQueued();
  return absl::OkStatus();
}

absl::Status TaskQueue::SubmitPair(std::function<void()> first, std::function<void()> second,
                                   Text full) {
  MutexLock lock(&mutex_);
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
  MutexLock lock(&mutex_);
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
  MutexLock lock(&mutex_);
  return static_cast<int>(queue_.size());
}

int TaskQueue::tasks() const {
  MutexLock lock(&mutex_);
  return static_cast<int>(queue_.size()) + running_;
}

absl::Duration TaskQueue::ExpectedTime() const {
  MutexLock lock(&mutex_);
  return mean_share_ * (static_cast<int64_t>(queue_.size()) + running_ + 1);
}

absl::Duration TaskQueue::ExpectedRunTime() const {
  MutexLock lock(&mutex_);
  return mean_share_ * static_cast<int64_t>(running_);
}

void TaskQueue::RecordDuration(absl::Duration took) {
  constexpr double kWeight = 1.0 / 16;
  MutexLock lock(&mutex_);
  mean_share_ += (took / std::max(running_, 1) - mean_share_) * kWeight;
}

void TaskQueue::TellQueued() {
  if (on_queued_ != nullptr) on_queued_(static_cast<int>(queue_.size()));
}

}  // namespace emberd
