// The two calls of a step, Gather and Apply, as a shard serves them: streams of long messages.
#pragma once

#include <cstdint>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "base/region_server.h"
#include "server/shard/shard_host.h"

namespace emberd::server {

using MessageReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

// Each deletes itself when its call is over. `host` must outlive it.
// `regions`: memory shared with callers; null: none. Must outlive it too.
MessageReactor* NewGatherStream(ShardHost* host, const grpc::ServerContextBase& context,
                                const rpc::MessageLimits& limits, const RegionServer* regions);
MessageReactor* NewApplyStream(ShardHost* host, const grpc::ServerContextBase& context,
                               const rpc::MessageLimits& limits, const RegionServer* regions);
// Ends the call at once.
MessageReactor* NewRefusedStream(const absl::Status& status);

}  // namespace emberd::server
