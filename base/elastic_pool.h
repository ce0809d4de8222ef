// Threads for work that blocks for as long as somebody else likes: every task has a thread at once,
// and threads are kept for later tasks.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace emberd {

// Thread-safe.
class ElasticPool {
 public:
  explicit ElasticPool(int max_threads) : max_threads_(max_threads) {}
  // Waits for all tasks.
  ~ElasticPool();
  ElasticPool(const ElasticPool&) = delete;
  ElasticPool& operator=(const ElasticPool&) = delete;

  // Runs both on threads of their own, or neither: false if fewer than two are free.
  [[nodiscard]] bool SubmitPair(std::function<void()> first, std::function<void()> second);
  int max_threads() const { return max_threads_; }
  int threads() const;

 private:
  void Work();

  const int max_threads_;
  mutable absl::Mutex mutex_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  int idle_ ABSL_GUARDED_BY(mutex_) =
      0;  // threads without a task, queued ones counted as given out
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd
