#include "server/launcher/make_token.h"

#include <fstream>
#include <sstream>

#include <openssl/rand.h>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "base/status.h"
#include "config/config.h"
#include "server/launcher/files.h"

namespace emberd::launcher {
namespace {

constexpr int kRandomBytes = 32;

absl::StatusOr<std::string> RandomToken() {
  unsigned char bytes[kRandomBytes];
  if (RAND_bytes(bytes, sizeof(bytes)) != 1) {
    return absl::InternalError("the system's random numbers cannot be read");
  }
  return absl::WebSafeBase64Escape(
      absl::string_view(reinterpret_cast<const char*>(bytes), sizeof(bytes)));
}

// What stands in the file; empty if there is none.
absl::StatusOr<std::string> OldText(const std::string& path) {
  const absl::Status status = config::LoadTokenFile(path).status();
  std::ifstream file(path);
  std::ostringstream text;
  if (file.is_open() && file.peek() != std::ifstream::traits_type::eof()) text << file.rdbuf();
  if (absl::IsNotFound(status) || (file.is_open() && text.str().empty())) return "";
  if (!status.ok()) return status;
  if (absl::StrContains(text.str(), "\"tokens\"")) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": tokens can be added to text protos, not to JSON"));
  }
  return text.str();
}

}  // namespace

absl::StatusOr<std::string> MakeToken(const NewToken& token) {
  absl::StatusOr<std::string> text = OldText(token.file);
  if (!text.ok()) return text.status();
  const absl::StatusOr<std::string> secret = RandomToken();
  if (!secret.ok()) return secret;
  if (!text->empty() && text->back() != '\n') text->push_back('\n');
  absl::StrAppend(&*text, "tokens { name: \"", absl::CEscape(token.name),
                  "\" role: ", v1::Token::Role_Name(token.role), " sha256: \"", Sha256Hex(*secret),
                  "\" }\n");
  // The whole file as processes will read it.
  absl::Status status = config::ParseTokenFile(*text).status();
  if (!status.ok()) {
    return absl::Status(status.code(), absl::StrCat(token.file, ": ", status.message()));
  }
  status = WriteFileAtomically(token.file, *text);
  if (!status.ok()) return status;
  return secret;
}

}  // namespace emberd::launcher
