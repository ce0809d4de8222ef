// The verbs of emberd that serve nothing: `emberd health` asks a process whether it serves, for
// container engines and scripts, and `emberd token` makes a token.
#pragma once

#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "emberd/v1/cluster.pb.h"
#include "server/security/security.h"

namespace emberd::launcher {

struct HealthOptions {
  std::string address = "127.0.0.1:7400";  // host:port of a coordinator or a shard
  absl::Duration timeout = absl::Seconds(2);
  // How to connect; null: in plain text.
  std::shared_ptr<const security::Security> security = nullptr;
};

// OK if grpc.health.v1 at the address answers SERVING in time. INVALID_ARGUMENT: not an address.
// UNAVAILABLE: it answers something else. Other codes are those of the call.
absl::Status CheckHealth(const HealthOptions& options);

// `emberd token`: a new token for a token file.
struct NewToken {
  std::string file;  // a TokenFile as text proto; made if it is not there
  std::string name;
  v1::Token::Role role = v1::Token::ROLE_UNSPECIFIED;
  absl::Duration patience = absl::Seconds(30);  // to wait for those that change the folder
};

// Draws a random token, hands it to `keep`, as it is nowhere else, and then adds its digest to the
// file; calls at the same time wait for each other. Running processes see it within about two
// seconds. INVALID_ARGUMENT: the name is taken or not allowed, or the file is not as it must be.
// UNAVAILABLE: somebody else has locked its folder. After any error, also one of `keep`, the file
// is as it was.
absl::Status MakeToken(const NewToken& token,
                       absl::FunctionRef<absl::Status(const std::string& secret)> keep);

}  // namespace emberd::launcher
