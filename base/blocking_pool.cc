#include "base/blocking_pool.h"

#include <algorithm>
#include <utility>

namespace emberd {

BlockingPool::BlockingPool(int threads, int max_queued, std::function<void(int)> on_queued)
    : max_queued_(max_queued), on_queued_(std::move(on_queued)) {
  threads_.reserve(threads);
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

BlockingPool::~BlockingPool() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

bool BlockingPool::Submit(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  if (static_cast<int>(queue_.size()) >= max_queued_) return false;
  queue_.push_back(std::move(task));
  TellQueued();
  return true;
}

int BlockingPool::queued() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(queue_.size());
}

int BlockingPool::tasks() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(queue_.size()) + running_;
}

absl::Duration BlockingPool::ExpectedTime() const {
  absl::MutexLock lock(&mutex_);
  return mean_share_ * (static_cast<int64_t>(queue_.size()) + running_ + 1);
}

absl::Duration BlockingPool::ExpectedRunTime() const {
  absl::MutexLock lock(&mutex_);
  return mean_share_ * static_cast<int64_t>(running_);
}

void BlockingPool::RecordDuration(absl::Duration took) {
  constexpr double kWeight = 1.0 / 16;
  absl::MutexLock lock(&mutex_);
  mean_share_ += (took / std::max(running_, 1) - mean_share_) * kWeight;
}

void BlockingPool::TellQueued() {
  if (on_queued_ != nullptr) on_queued_(static_cast<int>(queue_.size()));
}

void BlockingPool::Work() {
  const auto work_or_stop = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !queue_.empty() || stopping_;
  };
  while (true) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&work_or_stop));
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop_front();
      ++running_;
      TellQueued();
    }
    task();
    absl::MutexLock lock(&mutex_);
    --running_;
  }
}

}  // namespace emberd
