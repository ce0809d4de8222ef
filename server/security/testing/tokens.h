// One token of each role: what tests of this folder share.
#pragma once

#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::security {

inline constexpr v1::Token::Role kAllRoles[] = {
    v1::Token::READER, v1::Token::TRAINER, v1::Token::LOADER, v1::Token::ADMIN, v1::Token::CLUSTER};

// "the-token-of-reader", whose name is "reader".
inline std::string TokenOf(v1::Token::Role role) {
  return absl::StrCat("the-token-of-", absl::AsciiStrToLower(v1::Token::Role_Name(role)));
}

inline std::string Bearer(v1::Token::Role role) { return absl::StrCat("Bearer ", TokenOf(role)); }

inline v1::TokenFile TestTokens() {
  v1::TokenFile file;
  for (const v1::Token::Role role : kAllRoles) {
    v1::Token* const token = file.add_tokens();
    token->set_name(absl::AsciiStrToLower(v1::Token::Role_Name(role)));
    token->set_role(role);
    token->set_sha256(Sha256Hex(TokenOf(role)));
  }
  return file;
}

}  // namespace emberd::security
