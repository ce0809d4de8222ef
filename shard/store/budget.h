// Bytes that one partition may hold over all models.
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"

namespace emberd::shard {

// Thread-safe.
class Budget {
 public:
  explicit Budget(int64_t bytes_per_partition) : limit_(bytes_per_partition) {}
  // RESOURCE_EXHAUSTED, with the figures, if `bytes` more do not fit.
  absl::Status Take(int64_t bytes);
  void Return(int64_t bytes);

 private:
  const int64_t limit_;
  Mutex mutex_;
  int64_t used_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace emberd::shard
