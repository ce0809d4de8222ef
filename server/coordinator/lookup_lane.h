// Small lookups that come over lanes (server/rpc/lanes.h): each is done on the thread of its lane,
// under the same budgets, checks and statistics as a PooledCall, and with the same answer.
#pragma once

#include "base/lane_server.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/pooled_call.h"
#include "server/security/security.h"

namespace emberd::server {

// All of it must outlive the LaneServer; `security` may be null. The environment's queue is not
// used: there are as many threads as lanes.
LaneServer::Handler MakeLookupHandler(Coordinator* coordinator, const CallEnvironment& environment,
                                      const security::Security* security);

}  // namespace emberd::server
