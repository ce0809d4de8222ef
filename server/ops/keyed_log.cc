#include "server/ops/keyed_log.h"

#include <utility>

namespace emberd::ops {

void KeyedLog::Log(const std::string& key, LogLevel level, std::string_view message,
                   std::vector<LogField> fields) {
  RateLimitedLog* log = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    const bool shared = logs_.size() >= kMaxKeys && !logs_.contains(key);
    std::unique_ptr<RateLimitedLog>& entry = logs_[shared ? "" : key];
    if (entry == nullptr) entry = std::make_unique<RateLimitedLog>(period_);
    log = entry.get();
  }
  log->Log(level, message, std::move(fields));
}

}  // namespace emberd::ops
