// Groups over gRPC (collective_service.proto): the service at their host, and the way to it.
#pragma once

#include <memory>
#include <string>

#include <grpcpp/channel.h>
#include <grpcpp/impl/codegen/service_type.h>

#include "server/group/collective.h"
#include "server/ops/metrics.h"
#include "server/rpc/local_peers.h"

namespace emberd::group {

// What is given must outlive the service; without `place`, calls need not say for which shard they
// are meant. Close a rendezvous before the gRPC server is shut down: calls that wait would hold it
// up.
std::unique_ptr<grpc::Service> MakeCollectiveService(Collective* collective,
                                                     ops::ServerMetrics* metrics,
                                                     const rpc::ShardPlaceCheck* place = nullptr);

// `host` names it in errors of the transport, e.g. "shard 2 at 10.0.0.7:7002"; what the service
// itself says begins with the group's name. Its destructor ends calls that have no answer yet, and
// may not run in one of gRPC's callbacks.
std::unique_ptr<Collective> MakeRemoteCollective(const std::shared_ptr<grpc::Channel>& channel,
                                                 std::string host);

}  // namespace emberd::group
