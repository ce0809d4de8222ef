#include "server/security/refusal_log.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace emberd::security {
namespace {

constexpr absl::Duration kPeriod = absl::Minutes(1);
constexpr char kOther[] = "";

}  // namespace

void RefusalLog::Add(const Refusal& refusal) {
  const absl::string_view method = refusal.method.substr(0, Refusal::kMaxText);
  const absl::string_view agent = refusal.agent.substr(0, Refusal::kMaxText);
  std::string kind = absl::StrCat(method, "\n", refusal.reason, "\n", refusal.client, "\n", agent);
  std::vector<ops::LogField> fields = {{"method", method}, {"reason", refusal.reason}};
  if (!refusal.client.empty()) fields.emplace_back("client", refusal.client);
  if (!agent.empty()) fields.emplace_back("agent", agent);
  ops::RateLimitedLog* log = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    if (logs_.size() >= kMaxKinds && !logs_.contains(kind)) kind = kOther;
    std::unique_ptr<ops::RateLimitedLog>& entry = logs_[kind];
    if (entry == nullptr) entry = std::make_unique<ops::RateLimitedLog>(kPeriod);
    log = entry.get();
  }
  log->Log(ops::LogLevel::kWarning, "refused", std::move(fields));
}

}  // namespace emberd::security
