// Asks a process whether it serves, for container engines and scripts.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/security/security.h"

namespace emberd::launcher {

struct HealthOptions {
  std::string address = "127.0.0.1:7400";  // host:port of a coordinator or a shard
  absl::Duration timeout = absl::Seconds(2);
  // How to connect; null: in plain text.
  std::shared_ptr<const security::Security> security = nullptr;
};

// OK if grpc.health.v1 at the address answers SERVING in time. INVALID_ARGUMENT: not an address.
// UNAVAILABLE: it answers something else. Other codes are those of the call.
absl::Status CheckHealth(const HealthOptions& options);

}  // namespace emberd::launcher
