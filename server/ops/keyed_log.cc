#include "server/ops/keyed_log.h"

#include <utility>

#include "absl/time/clock.h"

namespace emberd::ops {

void KeyedLog::Log(const std::string& key, LogLevel level, std::string_view message,
                   std::vector<LogField> fields) {
  std::shared_ptr<RateLimitedLog> log;
  {
    absl::MutexLock lock(&mutex_);
    if (logs_.size() >= kMaxKeys && !logs_.contains(key)) {
      absl::erase_if(logs_,
                     [now = absl::Now()](const auto& entry) { return entry.second->IsOver(now); });
    }
    const bool shared = logs_.size() >= kMaxKeys && !logs_.contains(key);
    std::shared_ptr<RateLimitedLog>& entry = logs_[shared ? "" : key];
    if (entry == nullptr) entry = std::make_shared<RateLimitedLog>(period_);
    log = entry;
  }
  log->Log(level, message, std::move(fields));
}

}  // namespace emberd::ops
