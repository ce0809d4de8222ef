#include "config/security.h"

#include <string>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "config/address.h"
#include "config/config.h"
#include "config/fields.h"

namespace emberd::config {
namespace {

constexpr int kDigestDigits = 64;

// INVALID_ARGUMENT if the path `value` is empty, because `reason`.
absl::Status CheckPresent(absl::string_view field, const std::string& value,
                          absl::string_view reason) {
  if (!value.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("security.", field, ": empty; ", reason));
}

absl::Status CheckTls(const v1::TlsConfig& tls) {
  absl::Status status = CheckPresent("tls.certificate_file", tls.certificate_file(),
                                     "TLS needs the certificate of the process");
  if (status.ok()) {
    status = CheckPresent("tls.key_file", tls.key_file(), "TLS needs the key of the certificate");
  }
  if (status.ok()) {
    status = CheckPresent("tls.ca_file", tls.ca_file(),
                          "TLS needs the authorities that coordinators trust for shards");
  }
  return status;
}

// Whoever listens on the way reads a token that travels in plain text. gRPC, which sees to that,
// takes connections over these addresses alone, and not over the rest of 127.0.0.0/8.
bool MayCarryPlainTokens(const std::string& host) {
  return host == "127.0.0.1" || host == "[::1]" || host == "localhost";
}

template <typename Process>
absl::Status CheckPlainTokens(const google::protobuf::RepeatedPtrField<Process>& processes,
                              absl::string_view list) {
  for (int i = 0; i < processes.size(); ++i) {
    for (const auto& [field, text] : {std::pair("address", processes[i].address()),
                                      std::pair("http_address", processes[i].http_address())}) {
      if (text.empty()) continue;
      const absl::StatusOr<Address> address = ParseAddress(text);
      if (!address.ok()) return address.status();
      if (MayCarryPlainTokens(address->host)) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          FieldPath(FieldPath("", list, i), field), ": ", QuotedText(text),
          " is not 127.0.0.1, [::1] or localhost, and tokens would travel there in plain text; "
          "security.tokens_file needs security.tls"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckDigest(const std::string& path, const v1::Token& token) {
  const bool hex = absl::c_all_of(
      token.sha256(), [](char c) { return absl::ascii_isxdigit(static_cast<unsigned char>(c)); });
  if (hex && token.sha256().size() == kDigestDigits) return absl::OkStatus();
  // Not shown: it may be the token itself, by mistake.
  return absl::InvalidArgumentError(
      absl::StrCat(FieldPath(path, "sha256"), ": a text of ", token.sha256().size(),
                   " characters is not allowed; it must be 64 hex digits, the SHA-256 of the "
                   "token"));
}

}  // namespace

absl::Status CheckSecurity(const v1::ClusterConfig& cluster) {
  const v1::SecurityConfig& security = cluster.security();
  absl::Status status;
  if (security.has_tls()) status = CheckTls(security.tls());
  const bool tokens = !security.tokens_file().empty();
  if (status.ok() && tokens) {
    status = CheckPresent("cluster_token_file", security.cluster_token_file(),
                          "with tokens_file, coordinators need a token for shards");
  }
  if (status.ok() && !security.cluster_token_file().empty()) {
    status = CheckPresent("tokens_file", security.tokens_file(),
                          "it must list the token of cluster_token_file");
  }
  if (!status.ok() || !tokens || security.has_tls()) return status;
  status = CheckPlainTokens(cluster.shards(), "shards");
  return status.ok() ? CheckPlainTokens(cluster.coordinators(), "coordinators") : status;
}

absl::Status CompleteTokenFile(v1::TokenFile* file) {
  absl::Status status = CheckFields(*file);
  if (!status.ok()) return status;
  if (file->tokens().empty()) {
    return absl::InvalidArgumentError("tokens: empty; at least one is needed");
  }
  v1::TokenFile complete = *file;
  absl::flat_hash_map<std::string, std::string> names;    // name -> path of the token
  absl::flat_hash_map<std::string, std::string> digests;  // the same for digests
  for (int i = 0; i < complete.tokens_size(); ++i) {
    v1::Token& token = *complete.mutable_tokens(i);
    const std::string path = FieldPath("", "tokens", i);
    if (token.role() == v1::Token::ROLE_UNSPECIFIED) {
      return NotAllowed(FieldPath(path, "role"), v1::Token::Role_Name(token.role()),
                        "one of READER, TRAINER, ADMIN, CLUSTER");
    }
    status = CheckDigest(path, token);
    if (!status.ok()) return status;
    absl::AsciiStrToLower(token.mutable_sha256());
    if (const auto [earlier, inserted] = names.emplace(token.name(), path); !inserted) {
      return NotAllowed(FieldPath(path, "name"), QuotedText(token.name()),
                        absl::StrCat("unique; it is also ", earlier->second, ".name"));
    }
    if (const auto [earlier, inserted] = digests.emplace(token.sha256(), path); !inserted) {
      return absl::InvalidArgumentError(absl::StrCat(FieldPath(path, "sha256"),
                                                     ": the token is also ", earlier->second,
                                                     "'s; give each name "
                                                     "a token of its own"));
    }
  }
  *file = std::move(complete);
  return absl::OkStatus();
}

}  // namespace emberd::config
