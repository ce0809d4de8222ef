// CheckpointService.
#pragma once

#include <memory>

#include <grpcpp/impl/codegen/service_type.h>

#include "server/coordinator/checkpoints.h"
#include "server/coordinator/pooled_call.h"

namespace emberd::server {

// What the arguments point to must outlive it. `environment` has a queue of its own: its calls may
// take long.
std::unique_ptr<grpc::Service> MakeCheckpointService(Checkpoints* checkpoints,
                                                     const CallEnvironment& environment);

}  // namespace emberd::server
