#include "server/rpc/message_bytes.h"

#include <grpcpp/impl/codegen/proto_utils.h>

#include "absl/strings/str_cat.h"

namespace emberd::rpc {

absl::Status DecodeMessage(const grpc::ByteBuffer& bytes, google::protobuf::Message* message) {
  grpc::ByteBuffer reader(bytes);  // shares the slices; decoding empties its argument
  if (grpc::GenericDeserialize<grpc::ProtoBufferReader, google::protobuf::Message>(&reader, message)
          .ok()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("the request is no ", message->GetTypeName()));
}

grpc::ByteBuffer EncodeMessage(const google::protobuf::Message& message) {
  grpc::ByteBuffer bytes;
  bool own_buffer = false;
  // Fails only for messages of 2 GiB and more, which the budgets rule out.
  (void)grpc::GenericSerialize<grpc::ProtoBufferWriter, google::protobuf::Message>(message, &bytes,
                                                                                   &own_buffer);
  return bytes;
}

}  // namespace emberd::rpc
