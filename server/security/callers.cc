#include "server/security/callers.h"

#include <grpcpp/server_context.h>
#include <openssl/crypto.h>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "base/sha256.h"

namespace emberd::security {
namespace {

// What follows the name of the scheme and blanks; empty if the scheme is another one.
absl::string_view AfterScheme(absl::string_view authorization, absl::string_view scheme) {
  if (!absl::StartsWithIgnoreCase(authorization, scheme)) return "";
  const absl::string_view rest = authorization.substr(scheme.size());
  return absl::StartsWith(rest, " ") ? absl::StripAsciiWhitespace(rest) : "";
}

// The tokens of the process. Never destroyed: calls may be answered until the very end.
Replaceable<std::shared_ptr<const TokenTable>>& ProcessTokens() {
  static auto* const tokens = new Replaceable<std::shared_ptr<const TokenTable>>;
  return *tokens;
}

// Of the roles that rise; LOADER came later than its number in the description says.
int Rank(v1::Token::Role role) {
  switch (role) {
    case v1::Token::READER:
      return 1;
    case v1::Token::TRAINER:
      return 2;
    case v1::Token::LOADER:
      return 3;
    case v1::Token::ADMIN:
      return 4;
    default:
      return 0;
  }
}

// The call's header; empty if there is none.
absl::string_view Authorization(const grpc::ServerContextBase& context) {
  const auto sent = context.client_metadata().find("authorization");
  if (sent == context.client_metadata().end()) return "";
  return {sent->second.data(), sent->second.size()};
}

// Whose token it is; null if it is none that is known.
const Caller* FindCaller(const TokenTable& tokens, absl::string_view authorization) {
  return authorization.empty() ? nullptr : tokens.Find(BearerToken(authorization));
}

}  // namespace

bool Suffices(v1::Token::Role role, v1::Token::Role least) {
  if (role == v1::Token::CLUSTER || least == v1::Token::CLUSTER) return role == least;
  return Rank(role) >= Rank(least);
}

TokenTable::TokenTable(const v1::TokenFile& file) {
  for (const v1::Token& token : file.tokens()) {
    entries_.push_back({absl::AsciiStrToLower(token.sha256()), {token.name(), token.role()}});
  }
}

const Caller* TokenTable::Find(absl::string_view token) const {
  const std::string digest = Sha256Hex(token);
  const Caller* found = nullptr;
  // Through to the end: the time must not tell where the token stands.
  for (const Entry& entry : entries_) {
    if (entry.digest.size() == digest.size() &&
        CRYPTO_memcmp(digest.data(), entry.digest.data(), digest.size()) == 0) {
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

std::string ClientName(const grpc::ServerContextBase& context) {
  return ClientName(Authorization(context), PeerAddress(context.peer()));
}

std::string ClientName(absl::string_view authorization, const std::string& address) {
  const std::shared_ptr<const TokenTable> tokens = ProcessTokens().Get();
  const Caller* const caller = tokens == nullptr ? nullptr : FindCaller(*tokens, authorization);
  return caller == nullptr ? address : caller->name;
}

v1::Token::Role RoleOf(const grpc::ServerContextBase& context) {
  return RoleOf(Authorization(context));
}

v1::Token::Role RoleOf(absl::string_view authorization) {
  const std::shared_ptr<const TokenTable> tokens = ProcessTokens().Get();
  if (tokens == nullptr) return v1::Token::ADMIN;
  const Caller* const caller = FindCaller(*tokens, authorization);
  return caller == nullptr ? v1::Token::ROLE_UNSPECIFIED : caller->role;
}

void NameClientsBy(std::shared_ptr<const TokenTable> tokens) {
  ProcessTokens().Set(std::move(tokens));
}

std::string PeerAddress(absl::string_view peer) {
  absl::string_view rest = peer;
  if (absl::ConsumePrefix(&rest, "ipv4:")) {
    return std::string(rest.substr(0, rest.rfind(':')));
  }
  if (absl::ConsumePrefix(&rest, "ipv6:")) {
    const std::string decoded =
        absl::StrReplaceAll(rest, {{"%5B", "["}, {"%5D", "]"}, {"%25", "%"}});
    const size_t open = decoded.find('[');
    const size_t close = decoded.rfind(']');
    if (open != std::string::npos && close != std::string::npos && open < close) {
      return decoded.substr(open + 1, close - open - 1);
    }
    return decoded;
  }
  return peer.empty() ? "unknown" : std::string(peer);
}

}  // namespace emberd::security
