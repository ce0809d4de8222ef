// "host:port" addresses that servers listen on.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace emberd::ops {

struct HostPort {
  std::string host;  // without the brackets of an IPv6 address
  int port = 0;
};

// INVALID_ARGUMENT unless `address` is host:port or [ipv6]:port with a host and a port of 0 to
// 65535.
absl::StatusOr<HostPort> ParseAddress(const std::string& address);
// The opposite; brackets around an IPv6 address.
std::string FormatAddress(const std::string& host, int port);

// OK if `address` is on the loopback interface (127.0.0.0/8, ::1 or localhost) or `insecure` is
// set. Otherwise INVALID_ARGUMENT: without TLS, whoever reaches the port reads and writes
// everything. `field` names the address in the message.
absl::Status CheckBindAllowed(const std::string& field, const std::string& address, bool insecure);

}  // namespace emberd::ops
