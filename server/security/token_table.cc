#include "server/security/token_table.h"

#include <algorithm>

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"

namespace emberd::security {
namespace {

// What follows the name of the scheme and blanks; empty if the scheme is another one.
absl::string_view AfterScheme(absl::string_view authorization, absl::string_view scheme) {
  if (!absl::StartsWithIgnoreCase(authorization, scheme)) return "";
  const absl::string_view rest = authorization.substr(scheme.size());
  return absl::StartsWith(rest, " ") ? absl::StripAsciiWhitespace(rest) : "";
}

}  // namespace

TokenTable::TokenTable(const v1::TokenFile& file) {
  for (const v1::Token& token : file.tokens()) {
    const std::string bytes = absl::HexStringToBytes(token.sha256());
    Entry entry{.digest = {}, .caller = {token.name(), token.role()}};
    std::copy_n(bytes.begin(), std::min(bytes.size(), entry.digest.size()), entry.digest.begin());
    entries_.push_back(std::move(entry));
  }
}

const Caller* TokenTable::Find(absl::string_view token) const {
  Digest digest;
  SHA256(reinterpret_cast<const uint8_t*>(token.data()), token.size(), digest.data());
  const Caller* found = nullptr;
  // Through to the end: the time must not tell where the token stands.
  for (const Entry& entry : entries_) {
    if (CRYPTO_memcmp(digest.data(), entry.digest.data(), digest.size()) == 0) {
      found = &entry.caller;
    }
  }
  return found;
}

absl::string_view BearerToken(absl::string_view authorization) {
  return AfterScheme(authorization, "Bearer");
}

std::string BasicPassword(absl::string_view authorization) {
  std::string pair;
  if (!absl::Base64Unescape(AfterScheme(authorization, "Basic"), &pair)) return "";
  const size_t colon = pair.find(':');
  return colon == std::string::npos ? "" : pair.substr(colon + 1);
}

std::string RoleName(v1::Token::Role role) { return v1::Token::Role_Name(role); }

}  // namespace emberd::security
