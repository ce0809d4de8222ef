// `emberd token`: a new token for a token file.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::launcher {

struct NewToken {
  std::string file;  // a TokenFile as text proto; made if it is not there
  std::string name;
  v1::Token::Role role = v1::Token::ROLE_UNSPECIFIED;
};

// Draws a random token, adds its digest to the file, and gives the token, which is nowhere else.
// Running processes do not see it before they start again. INVALID_ARGUMENT: the name is taken or
// not allowed, or the file is not as it must be; then it stays as it is.
absl::StatusOr<std::string> MakeToken(const NewToken& token);

}  // namespace emberd::launcher
