#include "client/cpp/options.h"

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "config/address.h"

namespace emberd::client {
namespace {

absl::Status Bad(absl::string_view field, absl::string_view value, absl::string_view allowed) {
  return absl::InvalidArgumentError(
      absl::StrCat("ClientOptions.", field, ": ", value, " is not allowed; it must be ", allowed));
}

bool PositiveAndFinite(absl::Duration d) {
  return d > absl::ZeroDuration() && d < absl::InfiniteDuration();
}

}  // namespace

absl::Status ClientOptions::Validate() const {
  if (addresses.empty()) return Bad("addresses", "an empty list", "one address or more");
  for (size_t i = 0; i < addresses.size(); ++i) {
    // Here, for gRPC would take a port modulo 2^16 and look for a URL's server in its own ways.
    const absl::StatusOr<config::Address> address = config::ParseAddress(addresses[i]);
    if (!address.ok() || address->port == 0) {
      return Bad(absl::StrCat("addresses[", i, "]"), absl::StrCat("\"", addresses[i], "\""),
                 "\"host:port\" with a port in [1, 65535], for example \"127.0.0.1:7400\"");
    }
  }
  if (!token.empty() && !token_file.empty()) {
    return Bad("token", "a token together with token_file", "only one of them");
  }
  const struct {
    absl::string_view name;
    absl::Duration value;
  } durations[] = {{"connect_timeout", connect_timeout},
                   {"deadline", deadline},
                   {"initial_backoff", initial_backoff},
                   {"max_backoff", max_backoff}};
  for (const auto& [name, value] : durations) {
    if (!PositiveAndFinite(value)) return Bad(name, absl::FormatDuration(value), "> 0 and finite");
  }
  if (max_backoff < initial_backoff) {
    return Bad("max_backoff", absl::FormatDuration(max_backoff),
               absl::StrCat(">= initial_backoff (", absl::FormatDuration(initial_backoff), ")"));
  }
  if (max_attempts < 1) return Bad("max_attempts", absl::StrCat(max_attempts), ">= 1");
  if (!(jitter >= 0 && jitter <= 1)) return Bad("jitter", absl::StrCat(jitter), "in [0, 1]");
  if (client_id.size() > 64) {
    return Bad("client_id", absl::StrCat(client_id.size(), " bytes"), "at most 64 bytes");
  }
  return ChosenTransport().status();
}

absl::StatusOr<TransportKind> ClientOptions::ChosenTransport() const {
  const char* const given = std::getenv("EMBERD_TRANSPORT");
  if (transport != TransportKind::kAuto || given == nullptr) return transport;
  const std::string_view name = given;
  if (name == "AUTO" || name.empty()) return TransportKind::kAuto;
  if (name == "TCP") return TransportKind::kTcp;
  if (name == "SHARED") return TransportKind::kShared;
  return absl::InvalidArgumentError(absl::StrCat("EMBERD_TRANSPORT: \"", given,
                                                 "\" is not allowed; it must be AUTO, TCP or "
                                                 "SHARED"));
}

std::string RandomUuid() {
  std::random_device random;
  const auto bits = [&random] { return static_cast<uint32_t>(random()); };
  const uint32_t a = bits(), b = bits(), c = bits(), d = bits();
  // The top bits of the third and fourth group give version and variant.
  return absl::StrFormat("%08x-%04x-%04x-%04x-%04x%08x", a, b >> 16, (b & 0x0fffu) | 0x4000u,
                         (c >> 16 & 0x3fffu) | 0x8000u, c & 0xffffu, d);
}

}  // namespace emberd::client
