// Messages to and from the bytes that gRPC carries.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include "absl/status/status.h"

namespace emberd::rpc {

// INVALID_ARGUMENT if the bytes are no message of this type.
absl::Status DecodeMessage(const grpc::ByteBuffer& bytes, google::protobuf::Message* message);
grpc::ByteBuffer EncodeMessage(const google::protobuf::Message& message);

}  // namespace emberd::rpc
