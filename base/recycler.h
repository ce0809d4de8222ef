// Objects with grown buffers, kept for the next user.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace emberd {

// Thread-safe. At most `keep` idle objects stay; more are freed.
template <typename T>
class Recycler {
 public:
  explicit Recycler(size_t keep) : keep_(keep) { idle_.reserve(keep); }

  std::unique_ptr<T> Take() {
    {
      MutexLock lock(&mutex_);
      if (!idle_.empty()) {
        std::unique_ptr<T> object = std::move(idle_.back());
        idle_.pop_back();
        return object;
      }
    }
    return std::make_unique<T>();
  }

  void Give(std::unique_ptr<T> object) {
    MutexLock lock(&mutex_);
    if (idle_.size() < keep_) idle_.push_back(std::move(object));
  }

 private:
  const size_t keep_;
  Mutex mutex_;
  std::vector<std::unique_ptr<T>> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd
