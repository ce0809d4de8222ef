// One coordinator of a Transport, for attempts of calls. Internal to the client.
#pragma once

#include <memory>

#include <google/protobuf/message.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/sync_stream.h>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/lanes.h"
#include "client/cpp/shared_memory.h"
#include "client/cpp/transport.h"
#include "emberd/v1/checkpoint_service.pb.h"

namespace emberd::client {

// Calls do what the stubs of gRPC's compiler would; `method`: "/emberd.v1.AdminService/Drain".
struct Coordinator {
  grpc::Status Call(const char* method, const google::protobuf::MessageLite& request,
                    grpc::ClientContext* context, google::protobuf::MessageLite* response) const;
  // Of a call with a stream of answers, of MethodOf(request).
  template <typename Answer>
  std::unique_ptr<grpc::ClientReader<Answer>> Read(const google::protobuf::Message& request,
                                                   grpc::ClientContext* context) const {
    const std::string method = MethodOf(request);
    return std::unique_ptr<grpc::ClientReader<Answer>>(
        grpc::internal::ClientReaderFactory<Answer>::Create(
            channel.get(), {method.c_str(), grpc::internal::RpcMethod::SERVER_STREAMING}, context,
            request));
  }

  std::shared_ptr<grpc::Channel> channel;
  // Those stay when the channel is replaced. Null: all goes by gRPC.
  std::shared_ptr<SharedMemory> memory;
  std::shared_ptr<LanePool> lanes;
};

// Runs a call of the CheckpointService that answers with progress to its end, as Transport::Call
// does. `progress` gets every message but the last, which is the result. Once a message has come
// the work has begun, and is not tried again. INTERNAL: the server ended the call too soon.
absl::StatusOr<v1::CheckpointProgress> RunWithProgress(
    Transport* transport, const google::protobuf::Message& request, absl::Duration deadline,
    absl::FunctionRef<void(const v1::CheckpointProgress&)> progress);

}  // namespace emberd::client
