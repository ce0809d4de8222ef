// Memory that a process gives to others on its machine, as the description of the cluster says: a
// coordinator to clients, a shard to coordinators. See shared_memory.proto.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "base/region_server.h"
#include "emberd/v1/cluster.pb.h"
#include "emberd/v1/shared_memory.pb.h"

namespace emberd::rpc {

// For clients and for coordinators. Null where it is not wanted, or the system does not let us:
// they go on by TCP.
std::unique_ptr<RegionServer> StartClientRegions(const v1::ClusterConfig& cluster);
std::unique_ptr<RegionServer> StartShardRegions(const v1::ClusterConfig& cluster);
// What a peer is answered. UNIMPLEMENTED if `regions` is null.
absl::StatusOr<v1::ShareMemoryResponse> InvitePeer(RegionServer* regions);

}  // namespace emberd::rpc
