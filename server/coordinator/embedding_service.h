// EmbeddingService over a Coordinator: the gRPC side of every public method but the training
// stream.
#pragma once

#include <memory>

#include <grpcpp/impl/codegen/service_type.h>

#include "base/lane_server.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/pooled_call.h"
#include "server/coordinator/train/train_stream.h"

namespace emberd::server {

// What the arguments point to must outlive the service. `lanes`: where small calls may go instead;
// null: there are none.
std::unique_ptr<grpc::Service> MakeEmbeddingService(Coordinator* coordinator, TrainStreams* streams,
                                                    LaneServer* lanes,
                                                    const CallEnvironment& environment);

}  // namespace emberd::server
