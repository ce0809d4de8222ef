#include "server/rpc/grpc_server.h"

#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "config/address.h"
#include "server/ops/lifecycle.h"

namespace emberd::server {
namespace {

// Peers may ask this often whether the connection lives, also while no call is in progress
// (coordinators and clients do). By default gRPC takes that for an attack.
constexpr int kMinPingMs = 5000;

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const Options& options) {
  ASSIGN_OR_RETURN(config::Address bind, config::ParseAddress(options.address));

  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  builder.SetMaxSendMessageSize(-1);
  if (options.max_calls_per_connection > 0) {
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_calls_per_connection);
  }
  // A second process on the same port must fail, not take half of the calls.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kMinPingMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  int port = 0;
  builder.AddListeningPort(options.address,
                           options.security == nullptr ? grpc::InsecureServerCredentials()
                                                       : options.security->ServerCredentials(),
                           &port);
  for (grpc::Service* service : options.services) builder.RegisterService(service);
  ops::EnableStandardServices(&builder);

  auto server = std::unique_ptr<GrpcServer>(new GrpcServer());
  server->server_ = builder.BuildAndStart();
  if (server->server_ == nullptr || port == 0) {
    return absl::UnavailableError(
        absl::StrCat(options.field, ": ", options.address, " cannot be bound; is it in use?"));
  }
  server->port_ = port;
  bind.port = port;
  server->address_ = bind.ToString();
  server->service_names_ = options.service_names;
  ops::SetServing(server->server_.get(), server->service_names_, true);
  return server;
}

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
  server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
  server_->Wait();
}

}  // namespace emberd::server
