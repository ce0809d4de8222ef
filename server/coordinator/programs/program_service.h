// emberd.v1.ProgramService over gRPC.
#pragma once

#include <memory>

#include <grpcpp/impl/codegen/service_type.h>

#include "server/coordinator/pooled_call.h"
#include "server/coordinator/programs/programs.h"
#include "server/ops/samples.h"

namespace emberd::server {

// What it is given must outlive the service. `samples` hears how long each call took that
// succeeded.
std::unique_ptr<grpc::Service> MakeProgramService(Programs* programs, ops::Samples* samples,
                                                  const CallEnvironment& environment);

}  // namespace emberd::server
