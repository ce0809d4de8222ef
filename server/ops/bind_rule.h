// Where a server may listen.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace emberd::ops {

// OK if `address` ("host:port") is on the loopback interface (127.0.0.0/8, ::1 or localhost) or
// `insecure` is set. Otherwise INVALID_ARGUMENT: without TLS, whoever reaches the port reads and
// writes everything. `field` names the address in the message.
absl::Status CheckBindAllowed(const std::string& field, const std::string& address, bool insecure);

}  // namespace emberd::ops
