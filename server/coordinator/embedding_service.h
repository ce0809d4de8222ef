// EmbeddingService and AdminService over a Coordinator.
#pragma once

#include <memory>

#include <grpcpp/impl/codegen/service_type.h>

#include "server/coordinator/coordinator.h"
#include "server/coordinator/pooled_call.h"
#include "server/coordinator/train/train_stream.h"

namespace emberd::server {

// What the arguments point to must outlive the services.
std::unique_ptr<grpc::Service> MakeEmbeddingService(Coordinator* coordinator, TrainStreams* streams,
                                                    const CallEnvironment& environment);
std::unique_ptr<grpc::Service> MakeAdminService(Coordinator* coordinator,
                                                const CallEnvironment& environment);

}  // namespace emberd::server
