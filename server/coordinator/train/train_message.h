// One message of a training stream, read so that gradients stay where gRPC has received them.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "emberd/v1/train.pb.h"
#include "server/rpc/wire.h"

namespace grpc {
class ByteBuffer;
}  // namespace grpc

namespace emberd::server {

struct TrainMessage {
  v1::TrainRequest request;
  // Of request.update().gradients(i): what would be in gradient().data(). Empty, or not as many: it
  // is in there.
  std::vector<rpc::SharedPieces> data = {};
};

// INVALID_ARGUMENT if the bytes are no TrainRequest.
absl::StatusOr<TrainMessage> DecodeTrainMessage(const grpc::ByteBuffer& bytes);

}  // namespace emberd::server
