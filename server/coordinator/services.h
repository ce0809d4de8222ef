// The public services of a coordinator over gRPC, and over lanes: EmbeddingService,
// CheckpointService, ProgramService and AdminService. What each call does stands in Coordinator,
// Checkpoints, Programs and Administration; of training streams, in train/.
#pragma once

#include <memory>

#include <grpcpp/impl/codegen/service_type.h>

#include "base/lane_server.h"
#include "server/coordinator/administration.h"
#include "server/coordinator/checkpoints.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/pooled_call.h"
#include "server/coordinator/programs/programs.h"
#include "server/coordinator/train/train_stream.h"
#include "server/ops/samples.h"
#include "server/security/security.h"

namespace emberd::coordinator {

// What the arguments point to must outlive a service.

// `lanes`: where small calls may go instead; null: there are none.
std::unique_ptr<grpc::Service> MakeEmbeddingService(Coordinator* coordinator, TrainStreams* streams,
                                                    LaneServer* lanes,
                                                    const CallEnvironment& environment);
// `environment` has a queue of its own: its calls may take long.
std::unique_ptr<grpc::Service> MakeCheckpointService(Checkpoints* checkpoints,
                                                     const CallEnvironment& environment);
// `samples` hears how long each call took that succeeded.
std::unique_ptr<grpc::Service> MakeProgramService(Programs* programs, ops::Samples* samples,
                                                  const CallEnvironment& environment);
std::unique_ptr<grpc::Service> MakeAdminService(Administration* administration,
                                                Coordinator* coordinator,
                                                const CallEnvironment& environment);

// Small lookups that come over lanes (server/rpc/local_peers.h): each is done on the thread of its
// lane, under the same budgets, checks and statistics as by gRPC, and with the same answer.
// `security` may be null. The environment's queue is not used: there are as many threads as lanes.
LaneServer::Handler MakeLookupHandler(Coordinator* coordinator, const CallEnvironment& environment,
                                      const security::Security* security);

}  // namespace emberd::coordinator
