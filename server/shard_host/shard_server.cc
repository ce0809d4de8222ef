#include "server/shard_host/shard_server.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/grpc_server.h"
#include "server/shard_host/shard_host.h"
#include "server/shard_host/shard_service.h"

namespace emberd::server {
namespace {

class ShardServerImpl final : public ShardServer {
 public:
  ShardServerImpl(std::unique_ptr<ShardHost> host, std::unique_ptr<grpc::Service> service,
                  std::unique_ptr<GrpcServer> server)
      : host_(std::move(host)), service_(std::move(service)), server_(std::move(server)) {}

  int port() const override { return server_->port(); }
  std::string address() const override { return server_->address(); }
  void Drain(absl::Duration grace) override { server_->Drain(grace); }

 private:
  // In this order: the server goes first, then what it calls.
  const std::unique_ptr<ShardHost> host_;
  const std::unique_ptr<grpc::Service> service_;
  const std::unique_ptr<GrpcServer> server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ShardServer>> ShardServer::Start(ShardServerOptions options) {
  absl::StatusOr<std::unique_ptr<ShardHost>> host =
      ShardHost::Create(options.cluster, options.shard_index, options.metrics);
  if (!host.ok()) return host.status();
  const int64_t max_message_bytes = options.cluster.budgets().max_message_bytes();
  std::unique_ptr<grpc::Service> service = MakeShardService(host->get(), max_message_bytes);

  GrpcServer::Options server_options;
  server_options.field = absl::StrCat("shards[", options.shard_index, "].address");
  server_options.address = options.cluster.shards(options.shard_index).address();
  server_options.max_message_bytes = max_message_bytes;
  server_options.services = {service.get()};
  server_options.service_names = {"emberd.internal.v1.ShardService"};
  absl::StatusOr<std::unique_ptr<GrpcServer>> server = GrpcServer::Start(server_options);
  if (!server.ok()) return server.status();
  return std::make_unique<ShardServerImpl>(*std::move(host), std::move(service),
                                           *std::move(server));
}

}  // namespace emberd::server
