#include "server/ops/address.h"

#include <arpa/inet.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace emberd::ops {
namespace {

bool IsLoopback(const std::string& host) {
  in_addr v4{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6{};
  if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return host == "localhost";
}

}  // namespace

absl::StatusOr<HostPort> ParseAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  HostPort result;
  bool valid = colon != std::string::npos && colon > 0 && colon + 1 < address.size();
  if (valid) {
    result.host = address.substr(0, colon);
    const bool bracketed = result.host.front() == '[' && result.host.back() == ']';
    if (bracketed) result.host = result.host.substr(1, result.host.size() - 2);
    const bool has_colon = absl::StrContains(result.host, ":");
    const std::string port = address.substr(colon + 1);
    valid = !result.host.empty() && has_colon == bracketed &&
            port.find_first_not_of("0123456789") == std::string::npos &&
            absl::SimpleAtoi(port, &result.port) && result.port <= 65535;
  }
  if (valid) return result;
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", address, "\" is not an address; it must be host:port or [ipv6]:port, port 0 to 65535"));
}

std::string FormatAddress(const std::string& host, int port) {
  if (absl::StrContains(host, ":")) return absl::StrCat("[", host, "]:", port);
  return absl::StrCat(host, ":", port);
}

absl::Status CheckBindAllowed(const std::string& field, const std::string& address, bool insecure) {
  const absl::StatusOr<HostPort> parsed = ParseAddress(address);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": ", parsed.status().message()));
  }
  if (insecure || IsLoopback(parsed->host)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      field, ": \"", address,
      "\" is not on the loopback interface, and traffic is not encrypted; use 127.0.0.1, "
      "or --insecure on a network that you trust"));
}

}  // namespace emberd::ops
