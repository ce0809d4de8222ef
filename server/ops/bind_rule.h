// Where a server may listen.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::ops {

// What stands between a port and whoever reaches it.
enum class Protection {
  kNone,       // plain text
  kEncrypted,  // TLS, but anybody may call
  kClosed,     // TLS, and callers need a certificate or a token
};

// Tokens without TLS are kNone: they only hold where the network does not see them, which is
// checked with the description.
Protection ProtectionOf(const v1::SecurityConfig& security);

// OK if `address` ("host:port") is on the loopback interface, if the port is closed to strangers,
// or if `insecure` is set. Otherwise INVALID_ARGUMENT: whoever reaches the port reads and writes
// everything. `field` names the address in the message.
absl::Status CheckBindAllowed(const std::string& field, const std::string& address,
                              Protection protection, bool insecure);

}  // namespace emberd::ops
