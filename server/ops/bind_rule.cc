#include "server/ops/bind_rule.h"

#include <arpa/inet.h>

#include "absl/strings/str_cat.h"
#include "config/address.h"

namespace emberd::ops {
namespace {

bool IsLoopback(const std::string& host) {
  in_addr v4{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  return host == "[::1]" || host == "localhost";
}

}  // namespace

absl::Status CheckBindAllowed(const std::string& field, const std::string& address, bool insecure) {
  const absl::StatusOr<config::Address> parsed = config::ParseAddress(address);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": \"", address, "\" is not allowed; ", parsed.status().message()));
  }
  if (insecure || IsLoopback(parsed->host)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      field, ": \"", address,
      "\" is not on the loopback interface, and traffic is not encrypted; use 127.0.0.1, or "
      "--insecure on a network that you trust"));
}

}  // namespace emberd::ops
