// Answers of a training stream on the wire. Activations are referenced, not copied; any protobuf
// client decodes them.
#pragma once

#include <cstdint>
#include <deque>

#include <grpcpp/support/byte_buffer.h>

#include "server/coordinator/train/train_session.h"

namespace emberd::server {

// Parts of about 1 MiB: a part ends with the activation that brings it to that size.
std::deque<grpc::ByteBuffer> EncodeTrainLookup(int64_t step, const TrainLookupOutput& output);

}  // namespace emberd::server
