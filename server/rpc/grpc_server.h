// The part that every gRPC server of emberd shares: binding, limits, standard services, draining.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/security/security.h"

namespace grpc {
class Server;
class Service;
}  // namespace grpc

namespace emberd::rpc {

class Acceptor;

// Serves from Start until Drain or destruction. Thread-safe.
class GrpcServer {
 public:
  struct Options {
    std::string field;    // names the address in errors, e.g. "shards[2].address"
    std::string address;  // "host:port"; port 0: the system picks one
    int64_t max_message_bytes = 0;
    int max_calls_per_connection = 0;  // at once; 0: any number
    // Memory for messages of which only a part is here, or that no call has taken yet; connections
    // take other memory.
    int64_t receive_bytes = 0;
    // Who may connect; null: anybody, in plain text.
    std::shared_ptr<const security::Security> security = nullptr;
    std::vector<grpc::Service*> services;    // must outlive the server
    std::vector<std::string> service_names;  // full names, for the health service
  };

  // UNAVAILABLE if the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const Options& options);
  ~GrpcServer();

  // "host:port" with the real port.
  const std::string& address() const { return address_; }

  // What health checks are answered, until Drain.
  void SetServing(bool serving);

  // Answers health checks with NOT_SERVING, takes no new calls, lets those in progress end for at
  // most `grace`, then cancels them. Blocks until all is over. Later calls return at once.
  void Drain(absl::Duration grace);

 private:
  GrpcServer();

  std::unique_ptr<Acceptor> acceptor_;
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::string> service_names_;
  std::string address_;
  absl::Mutex health_mutex_;
  bool stopping_ ABSL_GUARDED_BY(health_mutex_) = false;
};

}  // namespace emberd::rpc
