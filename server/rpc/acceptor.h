// Takes the connections of a gRPC server. gRPC's own listener hears no more of connections once it
// could not take one for want of a descriptor; this one goes on when there are some, and leaves the
// last few to the process's own files.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "base/file_descriptor.h"
#include "config/address.h"
#include "server/ops/logging.h"

namespace grpc::experimental {
class ExternalConnectionAcceptor;
}  // namespace grpc::experimental

namespace emberd::rpc {

// Thread-safe, but for Start and Stop.
class Acceptor {
 public:
  // Binds every address that the host has on this machine, and lets connections wait for Start.
  // UNAVAILABLE says why none can be bound, and what to do.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Listen(const config::Address& address);
  ~Acceptor();

  int port() const { return port_; }
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
  int port_ = 0;
  std::string address_;
  ops::RateLimitedLog out_of_descriptors_{absl::Minutes(1)};
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> server_;
  std::thread thread_;
};

}  // namespace emberd::rpc
