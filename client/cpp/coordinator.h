// One coordinator of a Transport, for attempts of calls. Internal to the client.
#pragma once

#include <memory>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include "base/lane_pool.h"
#include "client/cpp/shared_memory.h"
#include "emberd/v1/admin_service.grpc.pb.h"
#include "emberd/v1/checkpoint_service.grpc.pb.h"
#include "emberd/v1/embedding_service.grpc.pb.h"

namespace emberd::client {

struct Coordinator {
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::EmbeddingService::Stub> embedding;
  std::unique_ptr<v1::AdminService::Stub> admin;
  std::unique_ptr<v1::CheckpointService::Stub> checkpoint;
  // Those stay when the channel is replaced.
  std::shared_ptr<SharedMemory> memory;
  std::shared_ptr<LanePool> lanes;  // null: all calls go by gRPC
};

}  // namespace emberd::client
