#include "server/ops/http.h"

#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <utility>

#include <fcntl.h>
#include <gnutls/gnutls.h>
#include <microhttpd.h>
#include <netdb.h>
#include <prometheus/text_serializer.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/steady_time.h"
#include "config/address.h"

namespace emberd::ops {
namespace {

constexpr int kBacklog = 64;
constexpr size_t kMaxLoggedPath = 100;
constexpr absl::Duration kStopPatience = absl::Seconds(2);  // with pages that are being made
constexpr char kPlainText[] = "text/plain; charset=utf-8";

// On every answer. What is served comes from here alone, is not framed, and is always fresh.
constexpr std::pair<const char*, const char*> kHeaders[] = {
    {"Content-Security-Policy",
     "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
     "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
    {"X-Content-Type-Options", "nosniff"},
    {"Referrer-Policy", "no-referrer"},
    {"Cross-Origin-Resource-Policy", "same-origin"},
    {"Cache-Control", "no-store"},
};

std::string NumericHost(const sockaddr* address, socklen_t size) {
  char host[NI_MAXHOST] = "";
  getnameinfo(address, size, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
  return host;
}

int PortOf(int fd) {
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  char port[NI_MAXSERV] = "0";
  getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size);
  getnameinfo(reinterpret_cast<sockaddr*>(&bound), size, nullptr, 0, port, sizeof(port),
              NI_NUMERICSERV);
  return std::atoi(port);
}

// A listening socket.
absl::StatusOr<FileDescriptor> ListenOn(const addrinfo& address) {
  const int fd = socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, address.ai_protocol);
  if (fd < 0) return absl::UnavailableError(std::strerror(errno));
  FileDescriptor listening(fd);
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd, address.ai_addr, address.ai_addrlen) != 0 || listen(fd, kBacklog) != 0) {
    return absl::UnavailableError(std::strerror(errno));
  }
  return listening;
}

absl::StatusOr<FileDescriptor> Listen(const config::Address& address) {
  const bool brackets = absl::StartsWith(address.host, "[");
  const std::string host =
      brackets ? address.host.substr(1, address.host.size() - 2) : address.host;
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  // Whoever says localhost may say 127.0.0.1 elsewhere.
  if (host == "localhost") hints.ai_family = AF_INET;
  addrinfo* found = nullptr;
  const int failure =
      getaddrinfo(host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (failure != 0) return absl::UnavailableError(gai_strerror(failure));
  const absl::Cleanup free = [found] { freeaddrinfo(found); };
  return ListenOn(*found);
}

int StatusOf(const absl::Status& refusal) {
  switch (refusal.code()) {
    case absl::StatusCode::kUnauthenticated:
      return MHD_HTTP_UNAUTHORIZED;
    case absl::StatusCode::kPermissionDenied:
      return MHD_HTTP_FORBIDDEN;
    case absl::StatusCode::kResourceExhausted:
      return MHD_HTTP_TOO_MANY_REQUESTS;
    default:
      return MHD_HTTP_INTERNAL_SERVER_ERROR;
  }
}

HttpRequest RequestOf(MHD_Connection* connection, const std::string& path) {
  HttpRequest request{.path = path, .peer = "", .authorization = ""};
  const MHD_ConnectionInfo* const info =
      MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
  if (info != nullptr && info->client_addr != nullptr) {
    request.peer = NumericHost(info->client_addr, info->client_addr->sa_family == AF_INET6
                                                      ? sizeof(sockaddr_in6)
                                                      : sizeof(sockaddr_in));
  }
  const char* const authorization =
      MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION);
  if (authorization != nullptr) request.authorization = authorization;
  return request;
}

bool HasBody(MHD_Connection* connection) {
  for (const char* header : {MHD_HTTP_HEADER_CONTENT_LENGTH, MHD_HTTP_HEADER_TRANSFER_ENCODING}) {
    if (MHD_lookup_connection_value(connection, MHD_HEADER_KIND, header) != nullptr) return true;
  }
  return false;
}

// Basic makes a browser ask its user for a password, and again and again where a page polls by
// script. So only what was typed into the address bar is answered with it.
bool MayAskPerson(MHD_Connection* connection) {
  const char* const mode =
      MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Sec-Fetch-Mode");
  return mode == nullptr || std::strcmp(mode, "navigate") == 0;
}

// False if there is no memory for it.
bool Send(MHD_Connection* connection, const HttpAnswer& answer, const std::string& content_type) {
  MHD_Response* const response = MHD_create_response_from_buffer(
      answer.body.size(), const_cast<char*>(answer.body.data()), MHD_RESPMEM_MUST_COPY);
  if (response == nullptr) return false;
  const absl::Cleanup release = [response] { MHD_destroy_response(response); };
  for (const auto& [name, value] : kHeaders) MHD_add_response_header(response, name, value);
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, content_type.c_str());
  if (answer.status == MHD_HTTP_METHOD_NOT_ALLOWED) {
    MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
  }
  if (answer.status == MHD_HTTP_UNAUTHORIZED) {
    MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
    if (MayAskPerson(connection)) {
      MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE,
                              "Basic realm=\"emberd\", charset=\"UTF-8\"");
    }
  }
  // A body that came with the request is not read, so no other request can follow it.
  if (HasBody(connection)) MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
  return MHD_queue_response(connection, answer.status, response) == MHD_YES;
}

// In plain text: "403 a valid client certificate is needed".
bool Refuse(MHD_Connection* connection, int status, absl::string_view reason) {
  return Send(connection, {status, absl::StrCat(status, " ", reason, "\n")}, kPlainText);
}

// -1: it has none any more.
int SocketOf(MHD_Connection* connection) {
  const MHD_ConnectionInfo* const info =
      MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
  return info == nullptr ? -1 : info->connect_fd;
}

// Paths are compared as they come: an escaped one is no page.
size_t KeepEscapes(void*, MHD_Connection*, char* text) { return std::strlen(text); }

void LogLibrary(void*, const char* format, va_list arguments) {
  char text[512];
  std::vsnprintf(text, sizeof(text), format, arguments);
  Log(LogLevel::kDebug, "http", {{"error", absl::StripSuffix(text, "\n")}});
}

constexpr char kPriorities[] = "NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2";

MHD_OptionItem Text(MHD_OPTION option, const char* text) {
  return {option, 0, const_cast<char*>(text)};
}

// Options of MHD_start_daemon, to be used with MHD_USE_TLS; they point into `tls`.
std::vector<MHD_OptionItem> TlsOptions(const HttpTls& tls) {
  std::vector<MHD_OptionItem> options = {
      Text(MHD_OPTION_HTTPS_MEM_CERT, tls.certificate.c_str()),
      Text(MHD_OPTION_HTTPS_MEM_KEY, tls.key.c_str()),
      Text(MHD_OPTION_HTTPS_PRIORITIES, kPriorities),
  };
  if (!tls.client_ca.empty()) {
    options.push_back(Text(MHD_OPTION_HTTPS_MEM_TRUST, tls.client_ca.c_str()));
  }
  options.push_back({MHD_OPTION_END, 0, nullptr});
  return options;
}

// Whether the client has shown a certificate that an authority of HttpTls.client_ca signed and that
// is valid now.
bool HasClientCertificate(MHD_Connection* connection) {
  const MHD_ConnectionInfo* const info =
      MHD_get_connection_info(connection, MHD_CONNECTION_INFO_GNUTLS_SESSION);
  if (info == nullptr || info->tls_session == nullptr) return false;
  const auto session = static_cast<gnutls_session_t>(info->tls_session);
  // The library asks for a certificate; what comes, if anything, is for us to judge.
  unsigned faults = 0;
  return gnutls_certificate_verify_peers2(session, &faults) == GNUTLS_E_SUCCESS && faults == 0;
}

}  // namespace

struct HttpServer::Callbacks {
  // Called once the headers of a request are there, and never again after an answer.
  static MHD_Result Serve(void* server, MHD_Connection* connection, const char* path,
                          const char* method, const char*, const char*, size_t*, void**) {
    try {
      static_cast<HttpServer*>(server)->SetServing(connection, true);
      return static_cast<HttpServer*>(server)->Serve(connection, path, method) ? MHD_YES : MHD_NO;
    } catch (...) {
      return MHD_NO;  // hangs up
    }
  }

  // Called when a request has been answered, or given up.
  static void Completed(void* server, MHD_Connection* connection, void**,
                        MHD_RequestTerminationCode) {
    static_cast<HttpServer*>(server)->SetServing(connection, false);
  }

  // Called before the first request of a connection, and before its socket is closed.
  static void Notice(void* server, MHD_Connection* connection, void**,
                     MHD_ConnectionNotificationCode what) {
    const int socket = SocketOf(connection);
    if (socket < 0) return;
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
      static_cast<HttpServer*>(server)->AddConnection(socket);
    } else {
      static_cast<HttpServer*>(server)->RemoveConnection(socket);
    }
  }
};

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(HttpOptions options) {
  const std::string address = options.address;
  const absl::StatusOr<config::Address> parsed = config::ParseAddress(address);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", address, "\" is not allowed; ", parsed.status().message()));
  }
  absl::StatusOr<FileDescriptor> listening = Listen(*parsed);
  if (!listening.ok()) {
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on ", address, " for HTTP: ", listening.status().message(),
        ". Stop what listens there, or choose another address (--http, --http-address, "
        "or http_address in the description; empty: no web pages)"));
  }
  std::unique_ptr<HttpServer> server(
      new HttpServer(std::move(options), parsed->host, PortOf(listening->get())));
  server->listening_ = *std::move(listening);
  server->tls_ = server->options_.tls;
  server->daemon_ = server->Launch(server->tls_);
  if (server->daemon_ == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot serve HTTP on ", address));
  }
  return server;
}

MHD_Daemon* HttpServer::Launch(const std::optional<HttpTls>& tls) {
  // A copy, for the library closes it if it does not start.
  const int listening = fcntl(listening_.get(), F_DUPFD_CLOEXEC, 0);
  if (listening < 0) return nullptr;
  std::vector<MHD_OptionItem> tls_options = {{MHD_OPTION_END, 0, nullptr}};
  if (tls.has_value()) tls_options = TlsOptions(*tls);
  return MHD_start_daemon(MHD_USE_POLL_INTERNAL_THREAD | MHD_USE_THREAD_PER_CONNECTION |
                              MHD_USE_ITC | MHD_USE_ERROR_LOG |
                              (tls.has_value() ? MHD_USE_TLS : MHD_NO_FLAG),
                          0, nullptr, nullptr, &Callbacks::Serve, this,            //
                          MHD_OPTION_EXTERNAL_LOGGER, &LogLibrary, nullptr,        //
                          MHD_OPTION_NOTIFY_CONNECTION, &Callbacks::Notice, this,  //
                          MHD_OPTION_NOTIFY_COMPLETED, &Callbacks::Completed, this,
                          MHD_OPTION_UNESCAPE_CALLBACK, &KeepEscapes, nullptr,  //
                          MHD_OPTION_LISTEN_SOCKET, listening,                  //
                          MHD_OPTION_CONNECTION_LIMIT, static_cast<unsigned>(kMaxConnections),
                          MHD_OPTION_CONNECTION_MEMORY_LIMIT, static_cast<size_t>(kMaxHeaderBytes),
                          MHD_OPTION_CONNECTION_TIMEOUT, static_cast<unsigned>(kIdleSeconds),
                          MHD_OPTION_STRICT_FOR_CLIENT, 1,       //
                          MHD_OPTION_ARRAY, tls_options.data(),  //
                          MHD_OPTION_END);
}

absl::Status HttpServer::Renew(HttpTls tls) {
  if (!tls_.has_value()) return absl::FailedPreconditionError("HTTP is served in plain text");
  if (tls == *tls_) return absl::OkStatus();
  StopIdle();
  std::optional<HttpTls> renewed = std::move(tls);
  MHD_Daemon* const daemon = Launch(renewed);
  if (daemon == nullptr) {
    return absl::InvalidArgumentError(
        "the web server refuses the new certificate, or has no descriptor or thread for it, and "
        "keeps the old one");
  }
  Retire();
  daemon_ = daemon;
  tls_.swap(renewed);
  return absl::OkStatus();
}

void HttpServer::StopIdle() {
  std::erase_if(retired_, [](const Retired& retired) {
    const MHD_DaemonInfo* const info =
        MHD_get_daemon_info(retired.daemon, MHD_DAEMON_INFO_CURRENT_CONNECTIONS);
    if (info == nullptr || info->num_connections > 0) return false;
    MHD_stop_daemon(retired.daemon);
    return true;
  });
}

void HttpServer::Retire() {
  if (daemon_ == nullptr) return;
  retired_.push_back({daemon_, FileDescriptor(MHD_quiesce_daemon(daemon_))});
  daemon_ = nullptr;
}

HttpServer::HttpServer(HttpOptions options, std::string host, int port)
    : options_(std::move(options)), host_(std::move(host)), port_(port) {}

// The library crashes if it is stopped while it refuses what is no HTTP. So it is stopped when
// nothing can come any more: first no connection is taken, and those that are there are closed for
// reading, which ends them.
HttpServer::~HttpServer() {
  Retire();
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    for (const auto& [socket, connection] : connections_) shutdown(socket, SHUT_RD);
    const auto all_gone = [this]()
                              ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return connections_.empty(); };
    AwaitSteadily(&mutex_, absl::Condition(&all_gone), kStopPatience);
  }
  for (const Retired& retired : retired_) MHD_stop_daemon(retired.daemon);
}

void HttpServer::AddConnection(int socket) {
  absl::MutexLock lock(&mutex_);
  CloseLongestWaiting();
  connections_[socket] = {.since = SteadyNow()};
  if (stopping_) shutdown(socket, SHUT_RD);
}

void HttpServer::CloseLongestWaiting() {
  int waiting = 0;
  std::pair<const int, Connection>* longest = nullptr;
  for (auto& entry : connections_) {
    if (entry.second.serving || entry.second.closing) continue;
    ++waiting;
    if (longest == nullptr || entry.second.since < longest->second.since) longest = &entry;
  }
  if (waiting < kMaxWaiting) return;
  longest->second.closing = true;
  shutdown(longest->first, SHUT_RD);  // its thread does the rest
}

void HttpServer::SetServing(MHD_Connection* connection, bool serving) {
  absl::MutexLock lock(&mutex_);
  const auto found = connections_.find(SocketOf(connection));
  if (found == connections_.end()) return;
  found->second.serving = serving;
  found->second.since = SteadyNow();
}

void HttpServer::RemoveConnection(int socket) {
  absl::MutexLock lock(&mutex_);
  connections_.erase(socket);
}

std::string HttpServer::address() const { return absl::StrCat(host_, ":", port_); }

HttpAnswer HttpServer::Answer(const HttpRoute& route, const HttpRequest& request) const {
  try {
    return route.answer();
  } catch (const std::exception& error) {
    Log(LogLevel::kError, "http: a page failed", {{"path", request.path}, {"error", error.what()}});
    return {MHD_HTTP_INTERNAL_SERVER_ERROR, "500 this page failed; see the log of the process\n"};
  }
}

bool HttpServer::Serve(MHD_Connection* connection, const std::string& path,
                       const std::string& method) {
  if (options_.tls.has_value() && !options_.tls->client_ca.empty() &&
      !HasClientCertificate(connection)) {
    uncertified_.Log(LogLevel::kWarning, "refused",
                     {{"method", path.substr(0, kMaxLoggedPath)},
                      {"reason", "no valid client certificate"},
                      {"client", RequestOf(connection, path).peer}});
    return Refuse(connection, MHD_HTTP_FORBIDDEN, "a valid client certificate is needed");
  }
  const auto route =
      absl::c_find_if(options_.routes, [&](const HttpRoute& one) { return one.path == path; });
  if (route == options_.routes.end()) {
    return Refuse(connection, MHD_HTTP_NOT_FOUND, "there is no such page");
  }
  if (method != MHD_HTTP_METHOD_GET && method != MHD_HTTP_METHOD_HEAD) {
    return Refuse(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "only GET and HEAD are allowed");
  }
  const HttpRequest request = RequestOf(connection, path);
  if (!route->open && options_.admit) {
    const absl::Status admitted = options_.admit(request);
    if (!admitted.ok()) return Refuse(connection, StatusOf(admitted), admitted.message());
  }
  const HttpAnswer answer = Answer(*route, request);
  return Send(connection, answer, answer.status == MHD_HTTP_OK ? route->content_type : kPlainText);
}

HttpRoute MetricsRoute(const Metrics& metrics) {
  const auto answer = [collectables = metrics.collectables()]() -> HttpAnswer {
    std::vector<prometheus::MetricFamily> families;
    for (const auto& weak : collectables) {
      const auto collectable = weak.lock();
      if (collectable == nullptr) continue;
      std::vector<prometheus::MetricFamily> some = collectable->Collect();
      families.insert(families.end(), std::make_move_iterator(some.begin()),
                      std::make_move_iterator(some.end()));
    }
    return {200, prometheus::TextSerializer().Serialize(families)};
  };
  return {"/metrics", "text/plain; version=0.0.4; charset=utf-8", answer};
}

HttpRoute HealthRoute(std::function<bool()> serving) {
  const auto answer = [serving = std::move(serving)]() -> HttpAnswer {
    if (serving()) return {200, "serving\n"};
    return {503, "not serving\n"};
  };
  return {"/healthz", "text/plain; charset=utf-8", answer, /*open=*/true};
}

HttpRoute IndexRoute(const std::string& name, const std::vector<std::string>& paths) {
  std::string page =
      absl::StrCat("<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>emberd ",
                   name, "</title>\n<h1>emberd ", EMBERD_VERSION, ": ", name, "</h1>\n<ul>\n");
  for (const std::string& path : paths) {
    absl::StrAppend(&page, "<li><a href=\"", path, "\">", path, "</a></li>\n");
  }
  absl::StrAppend(&page, "</ul>\n</html>\n");
  const auto answer = [page]() -> HttpAnswer { return {200, page}; };
  return {"/", "text/html; charset=utf-8", answer, /*open=*/true};
}

}  // namespace emberd::ops
