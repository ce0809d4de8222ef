// A Collective over the CollectiveService of another process.
#pragma once

#include <memory>
#include <string>

#include <grpcpp/channel.h>

#include "server/group/collective.h"

namespace emberd::server {

// `host` names it in errors of the transport, e.g. "shard 2 at 10.0.0.7:7002"; what the service
// itself says begins with the group's name.
std::unique_ptr<Collective> MakeRemoteCollective(const std::shared_ptr<grpc::Channel>& channel,
                                                 std::string host);

}  // namespace emberd::server
