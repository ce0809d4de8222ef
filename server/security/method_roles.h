// What each method needs: the one table of who may do what.
#pragma once

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "emberd/v1/cluster.pb.h"

namespace emberd::security {

struct MethodRole {
  absl::string_view method;  // "/package.Service/Method"
  v1::Token::Role role;      // the least that may call it
};

absl::Span<const MethodRole> MethodRoles();

// True for health checks and reflection, which need no token.
bool IsOpen(absl::string_view method);
// The least role for a method. One that is not in the table needs ADMIN, who then learns that it is
// not there.
v1::Token::Role LeastRole(absl::string_view method);
// READER < TRAINER < ADMIN. CLUSTER suffices for CLUSTER alone, and nothing else does.
bool Suffices(v1::Token::Role role, v1::Token::Role least);

}  // namespace emberd::security
