#include "server/rpc/grpc_server.h"

#include <memory>
#include <string>
#include <utility>

#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "config/address.h"
#include "server/ops/lifecycle.h"
#include "server/ops/logging.h"
#include "server/rpc/acceptor.h"

namespace emberd::server {
namespace {

// Peers may ask this often whether the connection lives, also while no call is in progress
// (coordinators and clients do). By default gRPC takes that for an attack.
constexpr int kMinPingMs = 5000;

// For what connections themselves need, of the memory that gRPC may take.
constexpr int64_t kConnectionBytes = int64_t{16} << 20;

// Who has connected and does not speak HTTP/2 by then is a stranger, and is sent away.
constexpr int kStrangerMs = 20'000;

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const Options& options) {
  ASSIGN_OR_RETURN(config::Address bind, config::ParseAddress(options.address));
  absl::StatusOr<std::unique_ptr<rpc::Acceptor>> acceptor = rpc::Acceptor::Listen(bind);
  if (!acceptor.ok()) {
    return absl::UnavailableError(
        absl::StrCat(options.field, ": ", options.address, " ", acceptor.status().message()));
  }

  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  builder.SetMaxSendMessageSize(-1);
  if (options.max_calls_per_connection > 0) {
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_calls_per_connection);
  }
  // Where it is used up, gRPC reads less and ends calls that hold much: messages that never end
  // would fill the memory before anybody hears of them.
  builder.SetResourceQuota(grpc::ResourceQuota("emberd").Resize(
      static_cast<size_t>(options.receive_bytes + kConnectionBytes)));
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kStrangerMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kMinPingMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  auto connections = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      options.security == nullptr ? grpc::InsecureServerCredentials()
                                  : options.security->ServerCredentials());
  for (grpc::Service* service : options.services) builder.RegisterService(service);
  ops::EnableStandardServices(&builder);

  auto server = std::unique_ptr<GrpcServer>(new GrpcServer());
  {
    const ops::QuietGrpc quiet;
    server->server_ = builder.BuildAndStart();
  }
  if (server->server_ == nullptr) {
    return absl::UnavailableError(
        absl::StrCat(options.field, ": ", options.address,
                     " cannot be served; the log of gRPC at level DEBUG may say why"));
  }
  server->acceptor_ = *std::move(acceptor);
  server->port_ = server->acceptor_->port();
  bind.port = server->port_;
  server->address_ = bind.ToString();
  server->service_names_ = options.service_names;
  ops::SetServing(server->server_.get(), server->service_names_, true);
  server->acceptor_->Start(std::move(connections));
  return server;
}

GrpcServer::GrpcServer() = default;
GrpcServer::~GrpcServer() { Drain(absl::ZeroDuration()); }

void GrpcServer::SetServing(bool serving) {
  absl::MutexLock lock(&health_mutex_);
  if (!stopping_) ops::SetServing(server_.get(), service_names_, serving);
}

void GrpcServer::Drain(absl::Duration grace) {
  if (server_ == nullptr) return;  // it could not be started
  {
    absl::MutexLock lock(&health_mutex_);
    if (!stopping_) ops::SetServing(server_.get(), service_names_, false);
    stopping_ = true;
  }
  acceptor_->Stop();
  server_->Shutdown(ToSystemTime(SteadyNow() + grace));
  server_->Wait();
}

}  // namespace emberd::server
