// A gRPC server that hands the messages of every call on to another server, and back.
#pragma once

#include <memory>

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>

namespace emberd::bench {

// `next` must outlive the calls.
std::unique_ptr<grpc::CallbackGenericService> MakeRelay(grpc::GenericStub* next);

}  // namespace emberd::bench
