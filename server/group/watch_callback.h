// The callback of a GenerationWatch: runs once at most, and not after it was dropped.
#pragma once

#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace emberd::server {

// Thread-safe. Shared by the watch and by what will end it, since either may go first.
class WatchCallback {
 public:
  explicit WatchCallback(std::function<void(absl::Status)> ended) : ended_(std::move(ended)) {}

  void Run(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (ended_) std::exchange(ended_, nullptr)(status);
  }
  // Waits for a run in progress.
  void Drop() {
    absl::MutexLock lock(&mutex_);
    ended_ = nullptr;
  }

 private:
  absl::Mutex mutex_;
  std::function<void(absl::Status)> ended_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::server
