// A small web server for operators and their tools, and the pages that every server process has.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/file_descriptor.h"
#include "server/ops/logging.h"
#include "server/ops/metrics.h"

struct MHD_Connection;
struct MHD_Daemon;

namespace emberd::ops {

struct HttpAnswer {
  int status = 200;
  std::string body;
};

// A page. Whatever follows a '?' in a request does not matter.
struct HttpRoute {
  std::string path;  // begins with '/'; exactly this
  std::string content_type;
  std::function<HttpAnswer()> answer;  // called from many threads at once
  // Says nothing about the cluster, so that everybody may see it: HttpOptions.admit is not asked.
  bool open = false;
};

// What is known of a request before its route is called.
struct HttpRequest {
  std::string path;
  std::string peer;           // address of the client, without port
  std::string authorization;  // the header of this name; empty: none
};

// TLS 1.2 and above. All in PEM.
struct HttpTls {
  std::string certificate;  // with the chain above it
  std::string key;
  // Who must have signed the certificate of each client; without one, every page is status 403.
  // Empty: clients need none.
  std::string client_ca;

  bool operator==(const HttpTls&) const = default;
};

struct HttpOptions {
  std::string address;  // "host:port"; port 0: the system picks one
  std::vector<HttpRoute> routes = {};
  // Every request for a route that is not open passes here first. Not OK: it is refused with the
  // message; UNAUTHENTICATED is 401, PERMISSION_DENIED 403, RESOURCE_EXHAUSTED 429, others 500.
  // Called from many threads at once. Empty: all are admitted.
  std::function<absl::Status(const HttpRequest&)> admit = nullptr;
  std::optional<HttpTls> tls = std::nullopt;  // none: plain text
};

// Answers GET and HEAD, from one thread per connection, of which there are at most
// kMaxConnections; a client that is slow keeps only its own thread waiting. Nobody is kept out by
// clients that say nothing, or half of a request: where there are many connections, the one that
// has waited longest for its request is closed for a new one. Nothing is to be cached, and browsers
// load nothing from elsewhere. An exception in a route is status 500.
class HttpServer {
 public:
  static constexpr int kMaxConnections = 64;
  static constexpr int kMaxWaiting = 32;            // of them, for a request
  static constexpr int kMaxHeaderBytes = 32 << 10;  // of one request
  static constexpr int kIdleSeconds = 10;           // then the connection is closed

  // Serves until it is destroyed. INVALID_ARGUMENT: not an address. UNAVAILABLE: it cannot be
  // bound.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(HttpOptions options);
  ~HttpServer();  // at once, but for routes in progress

  // Connections that come from now on get `tls`; those that are there keep what they have. Only
  // where HttpOptions.tls was set; if that had a client_ca, `tls` must have one. After an error,
  // all stays as it was.
  absl::Status Renew(HttpTls tls);

  int port() const { return port_; }
  std::string address() const;  // "host:port" with the real port

 private:
  struct Callbacks;

  HttpServer(HttpOptions options, std::string host, int port);
  // Ends those of `retired_` that have no connections any more.
  void StopIdle();
  // `daemon_`, if there is one, takes no more connections.
  void Retire();
  // A daemon that takes connections from `listening_`; null: the library does not start it.
  MHD_Daemon* Launch(const std::optional<HttpTls>& tls);
  HttpAnswer Answer(const HttpRoute& route, const HttpRequest& request) const;
  bool Serve(MHD_Connection* connection, const std::string& path, const std::string& method);
  void AddConnection(int socket);
  // Whether the connection is being answered, or waits for its next request.
  void SetServing(MHD_Connection* connection, bool serving);
  void CloseLongestWaiting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RemoveConnection(int socket);

  const HttpOptions options_;
  const std::string host_;
  const int port_;
  RateLimitedLog uncertified_{absl::Minutes(1)};
  FileDescriptor listening_;
  MHD_Daemon* daemon_ = nullptr;  // null: it could not be started
  struct Retired {
    MHD_Daemon* daemon;
    FileDescriptor socket;  // which it took connections from; must not be closed before it stops
  };
  // Those before it, which serve the connections that they have. Changed by Renew alone.
  std::vector<Retired> retired_;
  std::optional<HttpTls> tls_;  // of `daemon_`

  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  struct Connection {
    bool serving = false;
    bool closing = false;
    absl::Time since;
  };
  std::map<int, Connection> connections_ ABSL_GUARDED_BY(mutex_);  // by socket
};

// /metrics, in the text format of Prometheus. `metrics` must outlive the server.
HttpRoute MetricsRoute(const Metrics& metrics);

// /healthz: 200 while `serving` says so, else 503.
HttpRoute HealthRoute(std::function<bool()> serving);

// `/`: the name of the process and links to `paths`.
HttpRoute IndexRoute(const std::string& name, const std::vector<std::string>& paths);

}  // namespace emberd::ops
