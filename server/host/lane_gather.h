// Small gathers without gRPC, where coordinator and shard are on one machine: both ends. See
// server/rpc/local_peers.h.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/lane_pool.h"
#include "base/lane_server.h"
#include "server/host/shard_backend.h"
#include "server/host/shard_host.h"
#include "server/rpc/message.h"
#include "server/security/security.h"

namespace emberd::host {

// The shard's end. All of it must outlive the LaneServer; `security` may be null.
LaneServer::Handler MakeGatherHandler(ShardHost* host, const security::Security* security);

// What a coordinator's end needs beside its lanes.
struct LaneGatherOptions {
  LanePool* lanes = nullptr;
  rpc::MessageLimits limits;                                 // of answers
  std::string authorization;                                 // of the call
  std::function<absl::Status(const absl::Status&)> explain;  // says which shard an error came from
};
// Makes the call on a lane, if it is small and there is one; else, or if the lane breaks, by
// `by_grpc`, which then gets the command. What is pointed to must outlive the result, and so must
// `context`.
using GrpcGather = std::function<std::unique_ptr<GatherCall>(GatherCommand command)>;
std::unique_ptr<GatherCall> MakeLaneGather(const LaneGatherOptions& options, GatherCommand command,
                                           rpc::CallContext* context, GrpcGather by_grpc);

}  // namespace emberd::host
