// Network addresses as the cluster description writes them.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace emberd::config {

// "host:port". The host is a DNS name or an IPv4 address, or an IPv6 address in brackets, which are
// kept.
struct Address {
  std::string host;  // lower case
  int port = 0;      // 0: the system picks one

  std::string ToString() const;
  // 0.0.0.0 and [::]: all interfaces of whatever machine the process runs on.
  bool is_wildcard() const { return host == "0.0.0.0" || host == "[::]"; }
  // 127.0.0.0/8, [::1] and localhost: nobody on another machine can reach it.
  bool is_loopback() const;
};

// INVALID_ARGUMENT says in what form the address must be.
absl::StatusOr<Address> ParseAddress(absl::string_view text);

}  // namespace emberd::config
