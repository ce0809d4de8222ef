// What is made in any order, by several threads, and told of in one order, as soon as enough is
// there.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace emberd::server {

// Thread-safe.
class CombinedInOrder {
 public:
  // `bytes`: of each thing. `tell` is called with the range of those that are there and that it has
  // not been called with, when they have `enough` bytes; by one thread at a time. Whoever waits for
  // the last thing takes the rest: it is never called with that.
  CombinedInOrder(std::vector<size_t> bytes, size_t enough,
                  std::function<void(size_t begin, size_t end)> tell)
      : bytes_(std::move(bytes)),
        enough_(enough),
        tell_(std::move(tell)),
        is_there_(bytes_.size()) {}

  // Thing `index` is there.
  void Add(size_t index) {
    absl::MutexLock lock(&mutex_);
    is_there_[index] = true;
    while (end_ < is_there_.size() && is_there_[end_]) waiting_ += bytes_[end_++];
    if (waiting_ < enough_ || end_ == is_there_.size()) return;
    tell_(std::exchange(begin_, end_), end_);
    waiting_ = 0;
  }

 private:
  const std::vector<size_t> bytes_;
  const size_t enough_;
  const std::function<void(size_t, size_t)> tell_;

  absl::Mutex mutex_;
  std::vector<bool> is_there_ ABSL_GUARDED_BY(mutex_);
  // Those that are there and have not been told of, and their bytes.
  size_t begin_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t end_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace emberd::server
