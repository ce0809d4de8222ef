// How bytes travel between processes, and where a port that is not closed may listen.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/v1/cluster.pb.h"
#include "server/ops/http.h"

namespace grpc {
class AuthMetadataProcessor;
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace emberd::security {

// TLS for all ports and connections of a process. Thread-safe.
class TransportSecurity {
 public:
  virtual ~TransportSecurity() = default;

  // For a gRPC port. `guard` sees the headers of each call; null: none.
  virtual std::shared_ptr<grpc::ServerCredentials> ServerCredentials(
      std::shared_ptr<grpc::AuthMetadataProcessor> guard) const = 0;
  // For connections to other processes of the cluster.
  virtual std::shared_ptr<grpc::ChannelCredentials> ChannelCredentials() const = 0;
  // For the port of the web server.
  virtual ops::HttpTls Http() const = 0;
  // Reads the files again: whoever connects from now on (over gRPC: within a second) meets what
  // they hold. Connections that are there stay. True: something has changed. An error, as of
  // MakeTlsTransport: everything stays as it was.
  virtual absl::StatusOr<bool> Reload() = 0;
};

// TLS 1.2 and above; with `require_client_certificate`, mutual. INVALID_ARGUMENT names the field
// and the file that is wrong. Warns in the log of a certificate that has expired or will soon.
absl::StatusOr<std::unique_ptr<TransportSecurity>> MakeTlsTransport(const v1::TlsConfig& config);

// What stands between a port and whoever reaches it.
enum class Protection {
  kNone,       // plain text
  kEncrypted,  // TLS, but anybody may call
  kClosed,     // TLS, and callers need a certificate or a token
};

// Tokens without TLS are kNone: they only hold where the network does not see them, which is
// checked with the description.
Protection ProtectionOf(const v1::SecurityConfig& security);

// OK if `address` ("host:port") is on the loopback interface, if the port is closed to strangers,
// or if `insecure` is set. Otherwise INVALID_ARGUMENT: whoever reaches the port reads and writes
// everything. `field` names the address in the message.
absl::Status CheckBindAllowed(const std::string& field, const std::string& address,
                              Protection protection, bool insecure);

}  // namespace emberd::security
