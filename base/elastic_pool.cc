#include "base/elastic_pool.h"

#include <utility>

namespace emberd {

ElasticPool::~ElasticPool() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

bool ElasticPool::SubmitPair(std::function<void()> first, std::function<void()> second) {
  absl::MutexLock lock(&mutex_);
  const int needed = 2 - idle_;
  if (static_cast<int>(threads_.size()) + needed > max_threads_) return false;
  for (; idle_ < 2; ++idle_) threads_.emplace_back([this] { Work(); });
  idle_ -= 2;
  queue_.push_back(std::move(first));
  queue_.push_back(std::move(second));
  return true;
}

int ElasticPool::threads() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(threads_.size());
}

void ElasticPool::Work() {
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
    }
    task();
    task = nullptr;
    absl::MutexLock lock(&mutex_);
    ++idle_;
  }
}

}  // namespace emberd
