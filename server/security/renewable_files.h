// Certificates, key and authorities that gRPC reads again while it serves.
#pragma once

#include <memory>

#include <grpcpp/security/tls_certificate_provider.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "config/credentials.h"

namespace emberd::security {

// gRPC watches files, believes whatever it finds there, and refuses everybody when it is damaged or
// only half written. So it is given files in memory that are replaced as a whole, by what has been
// checked. Thread-safe, but for Set beside Set.
class RenewableFiles {
 public:
  static absl::StatusOr<std::unique_ptr<RenewableFiles>> Create(const config::PemFiles& files);
  ~RenewableFiles();

  // For the credentials of ports and connections.
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider() const {
    return provider_;
  }
  // gRPC finds them within a second. An error: it keeps those that it has.
  absl::Status Set(const config::PemFiles& files);

 private:
  RenewableFiles(int identity_fd, int authorities_fd);

  // Never closed: gRPC reads them for as long as it has a port or a connection.
  const int identity_fd_;
  const int authorities_fd_;
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider_;
};

}  // namespace emberd::security
