// Who made a call: for quotas, for logs, and for what depends on more than the method.
#pragma once

#include <memory>
#include <string>

#include <grpcpp/server_context.h>

#include "absl/strings/string_view.h"
#include "server/security/token_table.h"

namespace emberd::security {

// The name of the call's token. A call without one, or where tokens do not count: the address that
// it comes from, without the port ("127.0.0.1", "::1"), so that all connections of a machine are
// one client. Never empty.
std::string ClientName(const grpc::ServerContextBase& context);

// Whether the call may do what needs the role TRAINER; always where tokens do not count.
bool MayTrain(const grpc::ServerContextBase& context);

// From now on, in the whole process, tokens have names. Null: they do not count.
void NameClientsBy(std::shared_ptr<const TokenTable> tokens);

// The address in a gRPC peer name ("ipv4:127.0.0.1:7400", "ipv6:%5B::1%5D:7400", "unix:path"),
// without scheme and port. What is neither IPv4 nor IPv6 is given back whole; "" as "unknown".
std::string PeerAddress(absl::string_view peer);

}  // namespace emberd::security
