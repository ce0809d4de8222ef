// A shard as a gRPC server.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/lanes.h"
#include "base/local_server.h"
#include "base/regions.h"
#include "base/thread_pools.h"
#include "emberd/v1/cluster.pb.h"
#include "server/group/rendezvous.h"
#include "server/host/shard_host.h"
#include "server/ops/metrics.h"
#include "server/rpc/grpc_server.h"
#include "server/rpc/local_peers.h"
#include "server/security/security.h"

namespace emberd::host {

struct ShardServerOptions {
  v1::ClusterConfig cluster;        // complete (config::CompleteCluster)
  int shard_index = 0;              // serves cluster.shards(shard_index)
  ops::Metrics* metrics = nullptr;  // required; must outlive the server
  ThreadPools* threads = nullptr;   // the same
  // Null: made as `cluster` says. Its tokens then name the clients of the whole process.
  std::shared_ptr<const security::Security> security = nullptr;
};

// Serves from Start until Drain or destruction. Thread-safe.
class ShardServer {
 public:
  // UNAVAILABLE if the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<ShardServer>> Start(ShardServerOptions options);
  ~ShardServer();

  // "host:port" with the real port.
  const std::string& address() const { return server_->address(); }

  // Not OK as long as it reads its log, or if that failed (ShardHost).
  absl::Status CheckReady() const { return host_->CheckReady(); }

  // Of the groups that have their host here.
  group::Rendezvous::Load groups() const { return rendezvous_.load(); }

  // Takes no new calls, lets those in progress end for at most `grace`, then cancels them. Blocks
  // until all is over.
  void Drain(absl::Duration grace);

 private:
  ShardServer(const ShardServerOptions& options, std::unique_ptr<ShardHost> host);

  // In this order: the server goes first, then what it calls.
  const std::unique_ptr<ShardHost> host_;
  const rpc::ShardPlaceCheck place_;
  group::Rendezvous rendezvous_;
  const std::unique_ptr<RegionServer> regions_;  // null: no memory is shared with coordinators
  const std::shared_ptr<const security::Security> security_;
  LaneServer lanes_;
  const std::unique_ptr<LocalServer> local_;  // null: nobody is let in
  const std::unique_ptr<grpc::Service> shard_service_;
  std::unique_ptr<rpc::GrpcServer> server_;
  std::thread ready_;  // says so to health checks
};

}  // namespace emberd::host
