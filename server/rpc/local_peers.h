// What processes on one machine have beside gRPC, if the description of the cluster allows it:
// memory that a coordinator shares with clients, and a shard with coordinators
// (base/regions.h), and lanes for their small calls (base/lanes.h). See
// shared_memory.proto.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/lanes.h"
#include "base/local_server.h"
#include "base/regions.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/v1/cluster.pb.h"
#include "emberd/v1/shared_memory.pb.h"
#include "server/ops/logging.h"
#include "server/security/security.h"

namespace grpc {
class ServerContextBase;
}  // namespace grpc

namespace emberd::rpc {

// Whom a process serves so: a coordinator its clients, a shard its coordinators.
enum class LocalPeers { kClients, kCoordinators };

// The memory that it shares with them. Null where the cluster's transport is TCP.
std::unique_ptr<RegionServer> MakeRegions(const v1::ClusterConfig& cluster, LocalPeers peers);
// Lets them in, for memory and for lanes. Null where the transport is TCP, or the system does not
// let us: all goes by gRPC then.
std::unique_ptr<LocalServer> ServeLocally(const v1::ClusterConfig& cluster, LocalPeers peers,
                                          RegionServer* regions, LaneServer* lanes);

// Who makes a gRPC call.
LocalPeer LocalPeerOf(const grpc::ServerContextBase& context);
// What ShareMemory answers. UNIMPLEMENTED if `server` is null.
absl::StatusOr<v1::ShareMemoryResponse> InvitePeer(LocalServer* server, LocalPeer peer);

// Serves one method on lanes. `number` is its number there, `method` its name in gRPC, a literal:
// "/package.Service/Method". `security` checks each call as it checks those of gRPC:
// UNAUTHENTICATED or PERMISSION_DENIED; if it is null, nothing is checked.
LaneServer::Handler ServeOnLanes(v1::LaneMethod number, absl::string_view method,
                                 const security::Security* security, LaneServer::Handler handler);

// When the caller gives up; after `default_patience` if it does not say.
absl::Time DeadlineOf(const LaneCall& call, absl::Duration default_patience);

// Whether a coordinator and a shard mean the same cluster. Rows lie where the order of the shards
// and their SparseCores put them, so a coordinator with another description would read, and
// overwrite, wrong rows. Every call to a shard therefore says which place its caller takes the
// shard to have (ShardPlace in shard_service.proto), and the shard refuses what differs.

// The metadata that carries a serialized ShardPlace.
inline constexpr char kShardPlaceKey[] = "emberd-shard-place-bin";

// Where `cluster`, which is complete, puts its shard `shard`.
internal::v1::ShardPlace PlaceOf(const v1::ClusterConfig& cluster, int shard);

// Thread-safe. Logs what it refuses, once a minute.
class ShardPlaceCheck {
 public:
  // For the process that is shard `shard` of `cluster`.
  ShardPlaceCheck(const v1::ClusterConfig& cluster, int shard);

  // FAILED_PRECONDITION names the first difference, also for a call that does not say its place.
  absl::Status Check(const grpc::ServerContextBase& context) const;
  // The same for what the metadata holds.
  absl::Status CheckPlace(const std::string& serialized) const;

 private:
  std::string FirstDifference(const internal::v1::ShardPlace& theirs) const;

  const internal::v1::ShardPlace place_;
  const std::string serialized_;
  const std::vector<std::string> addresses_;
  mutable ops::KeyedLog refusals_{absl::Minutes(1)};
};

}  // namespace emberd::rpc
