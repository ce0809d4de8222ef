// A LookupResponse on the wire, made by hand: the activations are referenced, not copied. Any
// protobuf client decodes it.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include "server/coordinator/coordinator.h"

namespace emberd::server {

grpc::ByteBuffer EncodeLookupResponse(const LookupOutput& output);

}  // namespace emberd::server
