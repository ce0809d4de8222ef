// Who may connect to a process, how bytes travel, and what it shows to others.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "emberd/v1/cluster.pb.h"
#include "server/ops/http.h"
#include "server/ops/metrics.h"
#include "server/security/token_check.h"
#include "server/security/transport_security.h"

namespace grpc {
class Channel;
class ChannelArguments;
class ServerCredentials;
}  // namespace grpc

namespace emberd::security {

// Thread-safe. Made once in a process, for every port and every connection.
class Security {
 public:
  // Of a checked description. Reads all files that it names; INVALID_ARGUMENT or NOT_FOUND names
  // the field and the file that is wrong. `metrics` must outlive it and counts what is refused;
  // null: nothing is counted.
  static absl::StatusOr<std::shared_ptr<Security>> Create(const v1::SecurityConfig& config,
                                                          ops::Metrics* metrics = nullptr);

  // Reads the files again; what they hold counts for every call and every connection that is made
  // from now on. Connections that are there, and calls that have begun, go on. True: something has
  // changed. An error names what is wrong: where certificates are, they stay as they were, and so
  // do tokens.
  absl::StatusOr<bool> Reload();
  // Those files; none: there is nothing to read again.
  std::vector<std::string> Files() const;

  // For a gRPC port.
  std::shared_ptr<grpc::ServerCredentials> ServerCredentials() const;
  // A connection to another process of the cluster, which sends `metadata` and the cluster's token
  // with each call.
  using Metadata = std::vector<std::pair<std::string, std::string>>;
  std::shared_ptr<grpc::Channel> Connect(const std::string& address,
                                         const grpc::ChannelArguments& arguments,
                                         Metadata metadata = {}) const;
  // What ServerCredentials checks of each call, for calls that come another way.
  absl::Status CheckCall(const CallHeaders& call) const;
  // The header "authorization" with the cluster's token of now; empty without tokens.
  std::string OwnAuthorization() const;
  // For the web server: fills in `tls` and `admit`.
  void Protect(ops::HttpOptions* options) const;

 private:
  // The token that this process shows to others of the cluster. Thread-safe.
  class OwnToken;
  struct Tokens;

  explicit Security(v1::SecurityConfig config) : config_(std::move(config)) {}
  absl::StatusOr<bool> ReloadTokens() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const v1::SecurityConfig config_;
  std::unique_ptr<TransportSecurity> transport_;
  std::shared_ptr<TokenCheck> tokens_;              // null: no tokens
  std::shared_ptr<OwnToken> cluster_token_;         // null with it
  Mutex mutex_;                                     // one Reload at a time
  std::string token_file_ ABSL_GUARDED_BY(mutex_);  // what was read last, as text
};

}  // namespace emberd::security
