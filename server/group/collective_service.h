// CollectiveService over a Rendezvous. Never blocks a gRPC thread.
#pragma once

#include <memory>

#include <grpcpp/impl/codegen/service_type.h>

#include "server/group/rendezvous.h"
#include "server/ops/metrics.h"

namespace emberd::server {

// Both must outlive the service. Close the rendezvous before the gRPC server is shut down: calls
// that wait would hold it up.
std::unique_ptr<grpc::Service> MakeCollectiveService(Rendezvous* rendezvous,
                                                     ops::ServerMetrics* metrics);

}  // namespace emberd::server
