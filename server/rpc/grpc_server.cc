#include "server/rpc/grpc_server.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/file_descriptor.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "config/address.h"
#include "server/ops/lifecycle.h"
#include "server/ops/logging.h"

namespace emberd::rpc {

// Takes the connections of a gRPC server. gRPC's own listener never takes another connection after
// it could not take one because no file descriptor was free. This one goes on when there are some,
// and leaves the last few to the process's own files.
//
// Thread-safe, but for Start and Stop.
class Acceptor {
 public:
  // Binds every address that the host has on this machine, and lets connections wait for Start.
  // UNAVAILABLE says why none can be bound, and what to do.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Listen(const config::Address& address);
  ~Acceptor();

  // "host:port" with the real port.
  const std::string& address() const { return address_; }
  // Hands what connects to `server`, until Stop. Once.
  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> server);
  // Who connects from now on is refused.
  void Stop();

 private:
  explicit Acceptor(FileDescriptor wake) : wake_(std::move(wake)) {}
  void Serve();
  // False: descriptors are out for now.
  bool AcceptAll(int listener);

  const FileDescriptor wake_;
  std::vector<FileDescriptor> listeners_;
  std::string address_;
  ops::RateLimitedLog out_of_descriptors_{absl::Minutes(1)};
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> server_;
  std::thread thread_;
};

namespace {

// How often it looks whether descriptors have become free.
constexpr int kPauseMs = 50;

// How many of the process's descriptors are left to its files and to what it connects to.
rlim_t Reserve(rlim_t limit) { return std::clamp<rlim_t>(limit / 8, 4, 64); }

// Whether one more connection leaves enough descriptors for the rest of the process. The system
// gives the lowest one that is free, so if that is low, enough are free.
bool HasDescriptors(int descriptor, rlimit* limit) {
  if (getrlimit(RLIMIT_NOFILE, limit) != 0) return true;
  const FileDescriptor next(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
  return next.get() >= 0 &&
         static_cast<rlim_t>(next.get()) < limit->rlim_cur - Reserve(limit->rlim_cur);
}

// Why the system does not let a process listen at an address, and what to do.
std::string BindFault(int error) {
  switch (error) {
    case EADDRINUSE:
      return "is in use by another process; stop that one, or choose another port (0: the system "
             "picks one)";
    case EADDRNOTAVAIL:
      return "is not an address of this machine; take one of its own, or 0.0.0.0 for all of them";
    case EACCES:
      return "may not be used by this user; ports below 1024 need privileges";
    default:
      return absl::StrCat("cannot be used: ", std::generic_category().message(error));
  }
}

struct Listening {
  FileDescriptor socket;
  int port = 0;
  int error = 0;
};

Listening ListenOn(const sockaddr* address, socklen_t size) {
  FileDescriptor listener(
      socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1, off = 0;
  // For a port that was used a moment ago. One that another process listens at is refused all the
  // same.
  setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  // Connections inherit it.
  setsockopt(listener.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  // [::] hears IPv4 as well.
  setsockopt(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  if (listener.get() < 0 || bind(listener.get(), address, size) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0) {
    return {FileDescriptor(), 0, errno};
  }
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &length);
  const in_port_t port = bound.ss_family == AF_INET6
                             ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                             : reinterpret_cast<const sockaddr_in&>(bound).sin_port;
  return {std::move(listener), ntohs(port), 0};
}

using Found = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Found Find(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), "0", &hints, &found) != 0) found = nullptr;
  return {found, freeaddrinfo};
}

// The same port for all addresses of a host.
void SetPort(sockaddr* address, int port) {
  in_port_t& place = address->sa_family == AF_INET6
                         ? reinterpret_cast<sockaddr_in6*>(address)->sin6_port
                         : reinterpret_cast<sockaddr_in*>(address)->sin_port;
  place = htons(static_cast<uint16_t>(port));
}

// Peers may ask this often whether the connection lives, also while no call is in progress
// (coordinators and clients do). By default gRPC takes that for an attack.
constexpr int kMinPingMs = 5000;

// For what connections themselves need, of the memory that gRPC may take.
constexpr int64_t kConnectionBytes = int64_t{16} << 20;

// A peer that has not begun to speak HTTP/2 so long after it connected is sent away.
constexpr int kStrangerMs = 20'000;

}  // namespace

absl::StatusOr<std::unique_ptr<Acceptor>> Acceptor::Listen(const config::Address& address) {
  auto acceptor = std::unique_ptr<Acceptor>(new Acceptor(FileDescriptor(eventfd(0, EFD_CLOEXEC))));
  int port = address.port;
  absl::string_view host = address.host;
  absl::ConsumePrefix(&host, "[");
  absl::ConsumeSuffix(&host, "]");
  std::vector<std::string> hosts = {std::string(host)};
  // All interfaces: of IPv4 and of IPv6, where the machine has both.
  if (address.is_wildcard()) hosts = {"::", "0.0.0.0"};
  std::string fault = "cannot be used: its host is not known";
  for (const std::string& name : hosts) {
    const Found found = Find(name);
    for (addrinfo* at = found.get(); at != nullptr; at = at->ai_next) {
      SetPort(at->ai_addr, port);
      Listening listening = ListenOn(at->ai_addr, at->ai_addrlen);
      if (listening.error != 0) {
        fault = BindFault(listening.error);
        continue;
      }
      port = listening.port;
      acceptor->listeners_.push_back(std::move(listening.socket));
    }
    if (!acceptor->listeners_.empty()) break;
  }
  if (acceptor->listeners_.empty()) return absl::UnavailableError(fault);
  acceptor->address_ = config::Address{address.host, port}.ToString();
  return acceptor;
}

Acceptor::~Acceptor() { Stop(); }

void Acceptor::Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> server) {
  server_ = std::move(server);
  thread_ = std::thread([this] { Serve(); });
}

void Acceptor::Stop() {
  if (thread_.joinable()) {
    eventfd_write(wake_.get(), 1);
    thread_.join();
  }
  listeners_.clear();
}

void Acceptor::Serve() {
  std::vector<pollfd> watched = {{wake_.get(), POLLIN, 0}};
  for (const FileDescriptor& listener : listeners_) watched.push_back({listener.get(), POLLIN, 0});
  bool accepts = true;
  while (true) {
    // While descriptors are out, connections wait in the system's queue.
    const size_t count = accepts ? watched.size() : 1;
    if (poll(watched.data(), count, accepts ? -1 : kPauseMs) < 0) continue;
    if (watched[0].revents != 0) return;
    accepts = true;
    for (size_t i = 1; i < watched.size() && accepts; ++i) accepts = AcceptAll(watched[i].fd);
  }
}

bool Acceptor::AcceptAll(int listener) {
  while (true) {
    pollfd waiting = {listener, POLLIN, 0};
    if (poll(&waiting, 1, 0) <= 0) return true;
    rlimit limit{};
    const bool enough = HasDescriptors(listener, &limit);
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.listener_fd = listener;
    if (enough) connection.fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (connection.fd >= 0) {
      server_->HandleNewConnection(&connection);
      continue;
    }
    const int error = enough ? errno : EMFILE;
    const bool out = error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
    if (!out) continue;  // the peer has gone already
    out_of_descriptors_.Log(ops::LogLevel::kWarning,
                            "connections wait: no file descriptors are left for them",
                            {{"address", address_},
                             {"error", std::generic_category().message(error)},
                             {"limit", static_cast<int64_t>(limit.rlim_cur)},
                             {"kept_for_files", static_cast<int64_t>(Reserve(limit.rlim_cur))}});
    return false;
  }
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const Options& options) {
  ASSIGN_OR_RETURN(const config::Address bind, config::ParseAddress(options.address));
  absl::StatusOr<std::unique_ptr<Acceptor>> acceptor = Acceptor::Listen(bind);
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
  // When the quota is used up, gRPC reads less, and ends calls that hold much. Without one,
  // messages that never end would fill the memory before any service hears of them.
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
  server->address_ = server->acceptor_->address();
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

}  // namespace emberd::rpc
