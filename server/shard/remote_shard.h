// A shard in another process, behind gRPC.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "server/security/security.h"
#include "server/shard/shard_backend.h"

namespace emberd::server {

struct RemoteShardOptions {
  int index = 0;
  std::string address;            // "host:port"
  int64_t max_message_bytes = 0;  // budgets.max_message_bytes
  // How to connect; null: in plain text, without a token.
  std::shared_ptr<const security::Security> security = nullptr;
};

// Does not wait for the shard to be there: calls fail with UNAVAILABLE until it is, and find it
// again after a restart.
std::shared_ptr<ShardBackend> MakeRemoteShard(RemoteShardOptions options);

}  // namespace emberd::server
