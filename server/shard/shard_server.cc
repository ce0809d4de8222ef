#include "server/shard/shard_server.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/group/collective_rpc.h"
#include "server/group/rendezvous.h"
#include "server/rpc/grpc_server.h"
#include "server/shard/shard_host.h"
#include "server/shard/shard_service.h"

namespace emberd::server {
namespace {

class ShardServerImpl final : public ShardServer {
 public:
  ShardServerImpl(std::unique_ptr<ShardHost> host, int64_t max_message_bytes)
      : host_(std::move(host)),
        shard_service_(MakeShardService(host_.get(), max_message_bytes)),
        collective_service_(MakeCollectiveService(&rendezvous_, host_->metrics())) {}

  absl::Status Serve(const ShardServerOptions& options) {
    GrpcServer::Options server_options;
    server_options.field = absl::StrCat("shards[", options.shard_index, "].address");
    server_options.address = options.cluster.shards(options.shard_index).address();
    server_options.max_message_bytes = options.cluster.budgets().max_message_bytes();
    server_options.security = options.security;
    server_options.services = {shard_service_.get(), collective_service_.get()};
    server_options.service_names = {"emberd.internal.v1.ShardService",
                                    "emberd.internal.v1.CollectiveService"};
    auto server = GrpcServer::Start(server_options);
    if (server.ok()) server_ = *std::move(server);
    return server.status();
  }

  int port() const override { return server_->port(); }
  std::string address() const override { return server_->address(); }
  void Drain(absl::Duration grace) override {
    host_->metrics()->SetDraining(true);
    // What waits for other ranks would wait in vain: no call of theirs is taken any more.
    rendezvous_.Close(absl::UnavailableError("the shard that hosts the group is going away"));
    server_->Drain(grace);
  }

 private:
  // In this order: the server goes first, then what it calls.
  const std::unique_ptr<ShardHost> host_;
  Rendezvous rendezvous_;
  const std::unique_ptr<grpc::Service> shard_service_;
  const std::unique_ptr<grpc::Service> collective_service_;
  std::unique_ptr<GrpcServer> server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ShardServer>> ShardServer::Start(ShardServerOptions options) {
  if (options.security == nullptr) {
    auto security = security::Security::Create(options.cluster.security(), options.metrics);
    if (!security.ok()) return security.status();
    options.security = *std::move(security);
  }
  absl::StatusOr<std::unique_ptr<ShardHost>> host =
      ShardHost::Create(options.cluster, options.shard_index, options.metrics);
  if (!host.ok()) return host.status();
  auto server = std::make_unique<ShardServerImpl>(*std::move(host),
                                                  options.cluster.budgets().max_message_bytes());
  if (absl::Status status = server->Serve(options); !status.ok()) return status;
  return server;
}

}  // namespace emberd::server
