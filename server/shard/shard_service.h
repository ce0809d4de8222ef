// ShardService over a ShardHost: decodes, hands on, encodes. Never blocks a gRPC thread.
#pragma once

#include <cstdint>
#include <memory>

#include "base/blocking_pool.h"
#include "emberd/internal/v1/shard_service.grpc.pb.h"
#include "server/shard/shard_host.h"

namespace emberd::server {

// `host` must outlive the service.
std::unique_ptr<grpc::Service> MakeShardService(ShardHost* host, int64_t max_message_bytes);

}  // namespace emberd::server
