// Small calls without gRPC, as the description of the cluster says: those of clients to a
// coordinator, and of coordinators to a shard, on one machine. See base/lane_server.h and
// shared_memory.proto.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/lane_server.h"
#include "emberd/v1/cluster.pb.h"
#include "emberd/v1/shared_memory.pb.h"
#include "server/security/security.h"

namespace grpc {
class ServerContextBase;
}  // namespace grpc

namespace emberd::rpc {

// For clients and for coordinators. Null where they are not wanted, or the system does not let us:
// all goes by gRPC.
std::unique_ptr<LaneServer> StartClientLanes(const v1::ClusterConfig& cluster,
                                             LaneServer::Handler handler);
std::unique_ptr<LaneServer> StartShardLanes(const v1::ClusterConfig& cluster,
                                            LaneServer::Handler handler);

// Who makes a gRPC call.
LanePeer LanePeerOf(const grpc::ServerContextBase& context);
// Adds a ticket for `peer` to what ShareMemory answers. `lanes`: null: there are none.
void InviteToLane(LaneServer* lanes, LanePeer peer,
                  absl::StatusOr<v1::ShareMemoryResponse>* response);

// What gRPC checks of every call of `method` ("/package.Service/Method"): UNAUTHENTICATED or
// PERMISSION_DENIED. `security` may be null: then nothing is.
absl::Status CheckLaneCall(const security::Security* security, absl::string_view method,
                           const LaneCall& call);
absl::Status UnknownLaneMethod(const LaneCall& call);

// When the caller gives up; after `default_patience` if it does not say.
absl::Time DeadlineOf(const LaneCall& call, absl::Duration default_patience);

}  // namespace emberd::rpc
