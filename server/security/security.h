// Who may connect to a process, how bytes travel, and what it shows to others.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/channel.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include "absl/status/statusor.h"
#include "emberd/v1/cluster.pb.h"
#include "server/ops/http.h"
#include "server/ops/metrics.h"
#include "server/security/token_check.h"
#include "server/security/transport_security.h"

namespace emberd::security {

// Thread-safe. Made once in a process, for every port and every connection.
class Security {
 public:
  // Of a checked description. Reads all files that it names; INVALID_ARGUMENT or NOT_FOUND names
  // the field and the file that is wrong. `metrics` must outlive it and counts what is refused;
  // null: nothing is counted.
  static absl::StatusOr<std::shared_ptr<const Security>> Create(const v1::SecurityConfig& config,
                                                                ops::Metrics* metrics = nullptr);

  // For a gRPC port.
  std::shared_ptr<grpc::ServerCredentials> ServerCredentials() const;
  // A connection to another process of the cluster, which sends `metadata` and the cluster's token
  // with each call.
  using Metadata = std::vector<std::pair<std::string, std::string>>;
  std::shared_ptr<grpc::Channel> Connect(const std::string& address,
                                         const grpc::ChannelArguments& arguments,
                                         Metadata metadata = {}) const;
  // For the web server: fills in `tls` and `admit`.
  void Protect(ops::HttpOptions* options) const;

 private:
  Security() = default;

  std::unique_ptr<TransportSecurity> transport_;
  std::shared_ptr<const TokenCheck> tokens_;  // null: no tokens
  std::string cluster_token_;
};

}  // namespace emberd::security
