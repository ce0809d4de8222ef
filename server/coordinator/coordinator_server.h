// A coordinator as a gRPC server: its public services, EmbeddingService, CheckpointService,
// ProgramService and AdminService. Small lookups of this machine reach it over lanes, too.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/thread_pools.h"
#include "emberd/v1/cluster.pb.h"
#include "server/host/shard_backend.h"
#include "server/ops/metrics.h"
#include "server/security/security.h"

namespace emberd::coordinator {

class Administration;
class Coordinator;

struct CoordinatorServerOptions {
  v1::ClusterConfig cluster;  // complete (config::CompleteCluster)
  int coordinator_index = 0;  // serves cluster.coordinators(coordinator_index)
  // Shard by shard; empty: the shards at the addresses of `cluster`.
  std::vector<std::shared_ptr<host::ShardBackend>> shards;
  ops::Metrics* metrics = nullptr;  // required; must outlive the server
  ThreadPools* threads = nullptr;   // the same
  // Null: made as `cluster` says. Its tokens then name the clients of the whole process.
  std::shared_ptr<const security::Security> security = nullptr;
};

// Serves from Start until Drain or destruction. Thread-safe.
class CoordinatorServer {
 public:
  // Does not wait for the shards. UNAVAILABLE if the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<CoordinatorServer>> Start(CoordinatorServerOptions options);
  virtual ~CoordinatorServer() = default;

  virtual std::string address() const = 0;  // "host:port" with the real port

  // What it serves, for use in the process itself; they live as long as the server.
  virtual Coordinator* coordinator() = 0;
  virtual Administration* administration() = 0;

  // Drains as AdminService.Drain does, but for good, until no training stream is left, at most five
  // seconds and half of `grace`. Then takes no new calls, lets those in progress end until `grace`
  // is over, and cancels the rest. With durability CHECKPOINT the models are saved then, for which
  // a quarter of `grace` is kept: UNAVAILABLE names those that could not be. Blocks until all is
  // over.
  virtual absl::Status Drain(absl::Duration grace) = 0;
};

}  // namespace emberd::coordinator
