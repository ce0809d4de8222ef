// Who holds which token.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::security {

struct Caller {
  std::string name;
  v1::Token::Role role = v1::Token::ROLE_UNSPECIFIED;
};

// Thread-safe. Knows digests only: nobody can read a token out of it.
class TokenTable {
 public:
  explicit TokenTable(const v1::TokenFile& file);  // complete (config::CompleteTokenFile)

  // Who holds `token`, for as long as the table lives; null: nobody. How long it takes says nothing
  // about the tokens.
  const Caller* Find(absl::string_view token) const;

 private:
  using Digest = std::array<uint8_t, 32>;
  struct Entry {
    Digest digest;
    Caller caller;
  };
  std::vector<Entry> entries_;
};

// The token in "Bearer TOKEN"; empty if the header is something else.
absl::string_view BearerToken(absl::string_view authorization);
// The token in "Basic ..." (RFC 7617), where it is the password; empty if the header is something
// else. Browsers ask people for these.
std::string BasicPassword(absl::string_view authorization);

// "READER", for messages.
std::string RoleName(v1::Token::Role role);

}  // namespace emberd::security
