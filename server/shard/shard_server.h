// A shard as a gRPC server.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "emberd/v1/cluster.pb.h"
#include "server/ops/metrics.h"
#include "server/security/security.h"

namespace emberd::server {

struct ShardServerOptions {
  v1::ClusterConfig cluster;        // complete (config::CompleteCluster)
  int shard_index = 0;              // serves cluster.shards(shard_index)
  ops::Metrics* metrics = nullptr;  // required; must outlive the server
  // Null: made as `cluster` says. Its tokens then name the clients of the whole process.
  std::shared_ptr<const security::Security> security = nullptr;
};

// Serves from Start until Drain or destruction. Thread-safe.
class ShardServer {
 public:
  // UNAVAILABLE if the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<ShardServer>> Start(ShardServerOptions options);
  virtual ~ShardServer() = default;

  virtual int port() const = 0;
  virtual std::string address() const = 0;  // "host:port" with the real port

  // Takes no new calls, lets those in progress end for at most `grace`, then cancels them. Blocks
  // until all is over.
  virtual void Drain(absl::Duration grace) = 0;
};

}  // namespace emberd::server
