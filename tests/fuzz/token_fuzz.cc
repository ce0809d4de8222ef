// Token files, and headers that carry a token: the whole input as each. Catches: text that crashes
// a parser, a file that is accepted but names nobody or two at once, and one that lets in a token
// whose digest it does not have.
#include <set>
#include <string>

#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/text_format.h>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "config/config.h"
#include "server/security/security.h"
#include "tests/fuzz/fuzz_target.h"

namespace emberd {
namespace token_fuzz {

using fuzz::Require;

// The protobuf library writes what it refuses to standard error.
const google::protobuf::LogSilencer kSilence;

// In the seeds, and its SHA-256.
constexpr char kToken[] = "the-token-of-admin";
constexpr char kDigest[] = "972b16b1fc0112f53b77e4744e796ecf500c9093f4e9bf540fe3e226c3ef3634";

void CheckTokens(const v1::TokenFile& file) {
  std::set<std::string> names, digests;
  const v1::Token* holder = nullptr;
  for (const v1::Token& token : file.tokens()) {
    Require(!token.name().empty() && names.insert(token.name()).second, "names are unique");
    Require(token.sha256().size() == 64 && digests.insert(token.sha256()).second,
            "digests are whole and unique");
    Require(token.role() >= v1::Token::READER && token.role() <= v1::Token::CLUSTER,
            "everybody has a role");
    if (token.sha256() == kDigest) holder = &token;
  }
  const security::TokenTable table(file);
  const security::Caller* const caller = table.Find(kToken);
  Require((caller != nullptr) == (holder != nullptr), "a token is known by its digest alone");
  Require(holder == nullptr || (caller->name == holder->name() && caller->role == holder->role()),
          "a token is its holder's");
}

void TryFile(const std::string& text) {
  const absl::StatusOr<v1::TokenFile> file = config::ParseTokenFile(text);
  if (!file.ok()) {
    Require(!file.status().message().empty(), "an error says what is wrong");
    return;
  }
  fuzz::accepted = true;
  Require(!file->tokens().empty(), "a file without tokens is refused");
  CheckTokens(*file);
  std::string printed;
  google::protobuf::TextFormat::PrintToString(*file, &printed);
  const absl::StatusOr<v1::TokenFile> again = config::ParseTokenFile(printed);
  Require(again.ok() && again->SerializeAsString() == file->SerializeAsString(),
          "a complete file reads back as itself");
}

// Knows kToken alone.
const security::TokenTable& OneToken() {
  static const auto* const table = [] {
    v1::TokenFile file;
    v1::Token* token = file.add_tokens();
    token->set_name("admin");
    token->set_role(v1::Token::ADMIN);
    token->set_sha256(kDigest);
    return new security::TokenTable(file);
  }();
  return *table;
}

void CheckKnown(absl::string_view token) {
  Require((OneToken().Find(token) != nullptr) == (token == kToken), "one token is known");
}

void TryHeader(const std::string& header) {
  const absl::string_view bearer = security::BearerToken(header);
  if (!bearer.empty()) {
    Require(absl::StartsWithIgnoreCase(header, "bearer "), "a token follows its scheme");
    Require(absl::EndsWith(absl::StripTrailingAsciiWhitespace(header), bearer),
            "a token ends its header");
    Require(absl::StripAsciiWhitespace(bearer) == bearer, "a token has no outer blanks");
  }
  CheckKnown(bearer);
  const std::string password = security::BasicPassword(header);
  CheckKnown(password);
  fuzz::accepted |= !bearer.empty() || !password.empty();
}

// Any text as a password: it comes out whole, with its colons and blanks.
void TryPassword(const std::string& text) {
  const std::string header =
      absl::StrCat("Basic ", absl::Base64Escape(absl::StrCat("anybody:", text)));
  Require(security::BasicPassword(header) == text, "a password is what follows the first colon");
}

EMBERD_FUZZ_TARGET(token, data, size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  TryFile(text);
  TryHeader(text);
  TryPassword(text);
  return 0;
}

}  // namespace token_fuzz
}  // namespace emberd
