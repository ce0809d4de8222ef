// Serves /metrics for Prometheus.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/ops/metrics.h"

namespace prometheus {
class Exposer;
}

namespace emberd::ops {

// Serves from its own two threads from Start until it is destroyed.
class HttpServer {
 public:
  // Listens on `address` ("host:port"; port 0: the system picks one). `metrics` must outlive the
  // server. INVALID_ARGUMENT: not an address. UNAVAILABLE: the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           const Metrics& metrics);
  ~HttpServer();

  int port() const { return port_; }
  std::string address() const;  // "host:port" with the real port

 private:
  HttpServer(std::unique_ptr<prometheus::Exposer> exposer, std::string host, int port);

  std::unique_ptr<prometheus::Exposer> exposer_;
  const std::string host_;
  const int port_;
};

}  // namespace emberd::ops
