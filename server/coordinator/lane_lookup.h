// Small lookups that come over lanes (server/rpc/local_peers.h): each is done on the thread of its
// lane, under the same budgets, checks and statistics as by gRPC, and with the same answer.
#pragma once

#include "base/lane_server.h"
#include "server/coordinator/calls.h"
#include "server/coordinator/resources.h"
#include "server/security/security.h"

namespace emberd::coordinator {

// What the arguments point to must outlive the lanes; `security` may be null. The environment's
// queue is not used: there are as many threads as lanes.
LaneServer::Handler MakeLookupHandler(const CoordinatorResources* resources,
                                      const CallEnvironment& environment,
                                      const security::Security* security);

}  // namespace emberd::coordinator
