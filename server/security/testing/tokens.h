// One token of each role: what tests of this folder share.
#pragma once

#include <string>

#include <openssl/sha.h>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::security {

inline constexpr v1::Token::Role kAllRoles[] = {v1::Token::READER, v1::Token::TRAINER,
                                                v1::Token::ADMIN, v1::Token::CLUSTER};

// "the-token-of-reader", whose name is "reader".
inline std::string TokenOf(v1::Token::Role role) {
  return absl::StrCat("the-token-of-", absl::AsciiStrToLower(v1::Token::Role_Name(role)));
}

inline std::string Bearer(v1::Token::Role role) { return absl::StrCat("Bearer ", TokenOf(role)); }

inline v1::TokenFile TestTokens() {
  v1::TokenFile file;
  for (const v1::Token::Role role : kAllRoles) {
    const std::string text = TokenOf(role);
    std::string digest(SHA256_DIGEST_LENGTH, '\0');
    SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(),
           reinterpret_cast<unsigned char*>(digest.data()));
    v1::Token* const token = file.add_tokens();
    token->set_name(absl::AsciiStrToLower(v1::Token::Role_Name(role)));
    token->set_role(role);
    token->set_sha256(absl::BytesToHexString(digest));
  }
  return file;
}

}  // namespace emberd::security
