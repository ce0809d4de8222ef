// EmbeddingService over a Coordinator, AdminService over its Administration.
#pragma once

#include <memory>

#include <grpcpp/impl/codegen/service_type.h>

#include "server/coordinator/administration.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/pooled_call.h"
#include "server/coordinator/train/train_stream.h"

namespace emberd::server {

// What the arguments point to must outlive the services.
std::unique_ptr<grpc::Service> MakeEmbeddingService(Coordinator* coordinator, TrainStreams* streams,
                                                    const CallEnvironment& environment);
std::unique_ptr<grpc::Service> MakeAdminService(Administration* administration,
                                                const CallEnvironment& environment);

}  // namespace emberd::server
