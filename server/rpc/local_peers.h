// What processes on one machine have beside gRPC, as the description of the cluster says: memory
// that a coordinator gives to clients, and a shard to coordinators (base/region_server.h), and
// small calls of them (base/lane_server.h). See shared_memory.proto.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/lane_server.h"
#include "base/region_server.h"
#include "emberd/v1/cluster.pb.h"
#include "emberd/v1/shared_memory.pb.h"
#include "server/security/security.h"

namespace grpc {
class ServerContextBase;
}  // namespace grpc

namespace emberd::rpc {

// For clients and for coordinators. Null where they are not wanted, or the system does not let us:
// all goes by gRPC.
std::unique_ptr<RegionServer> StartClientRegions(const v1::ClusterConfig& cluster);
std::unique_ptr<RegionServer> StartShardRegions(const v1::ClusterConfig& cluster);
std::unique_ptr<LaneServer> StartClientLanes(const v1::ClusterConfig& cluster,
                                             LaneServer::Handler handler);
std::unique_ptr<LaneServer> StartShardLanes(const v1::ClusterConfig& cluster,
                                            LaneServer::Handler handler);

// Who makes a gRPC call.
LanePeer LanePeerOf(const grpc::ServerContextBase& context);
// What ShareMemory answers: tickets for both, as far as they are not null. UNIMPLEMENTED if there
// is neither.
absl::StatusOr<v1::ShareMemoryResponse> InvitePeer(RegionServer* regions, LaneServer* lanes,
                                                   LanePeer peer);

// What gRPC checks of every call of `method` ("/package.Service/Method"): UNAUTHENTICATED or
// PERMISSION_DENIED. `security` may be null: then nothing is.
absl::Status CheckLaneCall(const security::Security* security, absl::string_view method,
                           const LaneCall& call);
absl::Status UnknownLaneMethod(const LaneCall& call);

// When the caller gives up; after `default_patience` if it does not say.
absl::Time DeadlineOf(const LaneCall& call, absl::Duration default_patience);

}  // namespace emberd::rpc
