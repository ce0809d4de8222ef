#include "server/security/refusal_log.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace emberd::security {

void RefusalLog::Add(const Refusal& refusal) {
  const absl::string_view method = refusal.method.substr(0, Refusal::kMaxText);
  const absl::string_view client = refusal.client.substr(0, Refusal::kMaxText);
  const absl::string_view agent = refusal.agent.substr(0, Refusal::kMaxText);
  std::vector<ops::LogField> fields = {{"method", method}, {"reason", refusal.reason}};
  if (!client.empty()) fields.emplace_back("client", client);
  if (!agent.empty()) fields.emplace_back("agent", agent);
  log_.Log(absl::StrCat(method, "\n", refusal.reason, "\n", client, "\n", agent),
           ops::LogLevel::kWarning, "refused", std::move(fields));
}

}  // namespace emberd::security
