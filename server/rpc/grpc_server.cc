#include "server/rpc/grpc_server.h"

#include <cerrno>
#include <memory>
#include <string>
#include <system_error>

#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <netdb.h>
#include <sys/socket.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/file_descriptor.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "config/address.h"
#include "server/ops/lifecycle.h"
#include "server/ops/logging.h"

namespace emberd::server {
namespace {

// Peers may ask this often whether the connection lives, also while no call is in progress
// (coordinators and clients do). By default gRPC takes that for an attack.
constexpr int kMinPingMs = 5000;

// For what connections themselves need, of the memory that gRPC may take.
constexpr int64_t kConnectionBytes = int64_t{16} << 20;

// Why the system does not let a process listen at an address, and what to do.
std::string BindFault(const config::Address& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  absl::string_view host = address.host;
  absl::ConsumePrefix(&host, "[");
  absl::ConsumeSuffix(&host, "]");
  addrinfo* found = nullptr;
  if (getaddrinfo(std::string(host).c_str(), std::to_string(address.port).c_str(), &hints,
                  &found) != 0) {
    return "cannot be used: its host is not known";
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  const FileDescriptor probe(socket(found->ai_family, found->ai_socktype, found->ai_protocol));
  if (bind(probe.get(), found->ai_addr, found->ai_addrlen) == 0) {
    return "cannot be used; the log of gRPC at level DEBUG may say why";
  }
  switch (errno) {
    case EADDRINUSE:
      return "is in use by another process; stop that one, or choose another port (0: the system "
             "picks one)";
    case EADDRNOTAVAIL:
      return "is not an address of this machine; take one of its own, or 0.0.0.0 for all of them";
    case EACCES:
      return "may not be used by this user; ports below 1024 need privileges";
    default:
      return absl::StrCat("cannot be used: ", std::generic_category().message(errno));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const Options& options) {
  ASSIGN_OR_RETURN(config::Address bind, config::ParseAddress(options.address));

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
  {
    const ops::QuietGrpc quiet;
    server->server_ = builder.BuildAndStart();
  }
  if (server->server_ == nullptr || port == 0) {
    return absl::UnavailableError(
        absl::StrCat(options.field, ": ", options.address, " ", BindFault(bind)));
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
  server_->Shutdown(ToSystemTime(SteadyNow() + grace));
  server_->Wait();
}

}  // namespace emberd::server
