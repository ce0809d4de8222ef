#include "config/address.h"

#include <arpa/inet.h>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "config/fields.h"

namespace emberd::config {
namespace {

constexpr absl::string_view kForm =
    "\"host:port\" with a DNS name, an IPv4 address or an IPv6 address in brackets, and a port in "
    "[0, 65535]";

bool IsIpv6(absl::string_view host) {
  return absl::ConsumePrefix(&host, "[") && absl::ConsumeSuffix(&host, "]") && !host.empty() &&
         absl::c_all_of(
             host, [](unsigned char c) { return absl::ascii_isxdigit(c) || c == ':' || c == '.'; });
}

bool ParsePort(absl::string_view text, int* port) {
  return !text.empty() && text.size() <= 5 && absl::c_all_of(text, absl::ascii_isdigit) &&
         absl::SimpleAtoi(text, port) && *port <= 65535;
}

}  // namespace

std::string Address::ToString() const { return absl::StrCat(host, ":", port); }

bool Address::is_loopback() const {
  in_addr v4{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  return host == "[::1]" || host == "localhost";
}

absl::StatusOr<Address> ParseAddress(absl::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon != absl::string_view::npos) {
    const absl::string_view host = text.substr(0, colon);
    Address address{.host = absl::AsciiStrToLower(host)};
    if ((HasNameCharacters(host) || IsIpv6(host)) &&
        ParsePort(text.substr(colon + 1), &address.port)) {
      return address;
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("it must be ", kForm));
}

}  // namespace emberd::config
