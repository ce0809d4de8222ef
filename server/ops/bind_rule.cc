#include "server/ops/bind_rule.h"

#include "absl/strings/str_cat.h"
#include "config/address.h"

namespace emberd::ops {

Protection ProtectionOf(const v1::SecurityConfig& security) {
  if (!security.has_tls()) return Protection::kNone;
  const bool closed =
      security.tls().require_client_certificate() || !security.tokens_file().empty();
  return closed ? Protection::kClosed : Protection::kEncrypted;
}

absl::Status CheckBindAllowed(const std::string& field, const std::string& address,
                              Protection protection, bool insecure) {
  const absl::StatusOr<config::Address> parsed = config::ParseAddress(address);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": \"", address, "\" is not allowed; ", parsed.status().message()));
  }
  if (insecure || protection == Protection::kClosed || parsed->is_loopback()) {
    return absl::OkStatus();
  }
  const char* const lack = protection == Protection::kNone
                               ? "traffic is not encrypted; use 127.0.0.1, or security.tls with "
                                 "require_client_certificate or security.tokens_file"
                               : "anybody may call; use security.tls.require_client_certificate or "
                                 "security.tokens_file";
  return absl::InvalidArgumentError(absl::StrCat(field, ": \"", address,
                                                 "\" is not on the loopback interface, and ", lack,
                                                 ", or --insecure on a network that you trust"));
}

}  // namespace emberd::ops
