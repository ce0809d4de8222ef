// Who made a call, in one word: for quotas and logs.
#pragma once

#include <string>

#include <grpcpp/server_context.h>

#include "absl/strings/string_view.h"

namespace emberd::security {

// The property of a call's AuthContext that holds the name of its token.
inline constexpr char kClientNameProperty[] = "emberd-client";

// The name of the call's token. A call without one: the address that it comes from, without the
// port ("127.0.0.1", "::1"), so that all connections of a machine are one client. Never empty.
std::string ClientName(const grpc::ServerContextBase& context);

// The address in a gRPC peer name ("ipv4:127.0.0.1:7400", "ipv6:%5B::1%5D:7400", "unix:path"),
// without scheme and port. What is neither IPv4 nor IPv6 is given back whole; "" as "unknown".
std::string PeerAddress(absl::string_view peer);

}  // namespace emberd::security
