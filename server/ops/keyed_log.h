// A log of what anyone may cause, over and over and in endless variation.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/ops/logging.h"

namespace emberd::ops {

// A RateLimitedLog for each key. Thread-safe.
class KeyedLog {
 public:
  // Beyond so many keys within a period, the others share one line.
  static constexpr size_t kMaxKeys = 256;

  explicit KeyedLog(absl::Duration period) : period_(period) {}

  void Log(const std::string& key, LogLevel level, std::string_view message,
           std::vector<LogField> fields = {});

 private:
  const absl::Duration period_;
  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, std::shared_ptr<RateLimitedLog>> logs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace emberd::ops
