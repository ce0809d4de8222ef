#include "server/security/transport_security.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/address.h"
#include "config/credentials.h"
#include "server/ops/logging.h"

namespace emberd::security {
namespace {

constexpr int kWarnDays = 14;

class PlainTransport final : public TransportSecurity {
 public:
  std::shared_ptr<grpc::ServerCredentials> ServerCredentials(
      std::shared_ptr<grpc::AuthMetadataProcessor> guard) const override {
    if (guard == nullptr) return grpc::InsecureServerCredentials();
    // Insecure credentials take no guard. These speak plain text too, with any client that does.
    auto credentials = grpc::experimental::LocalServerCredentials(LOCAL_TCP);
    credentials->SetAuthMetadataProcessor(std::move(guard));
    return credentials;
  }
  std::shared_ptr<grpc::ChannelCredentials> ChannelCredentials() const override {
    return grpc::InsecureChannelCredentials();
  }
  std::optional<ops::HttpTls> Http() const override { return std::nullopt; }
};

class TlsTransport final : public TransportSecurity {
 public:
  TlsTransport(config::PemFiles files, bool require_client_certificate)
      : files_(std::move(files)), require_client_certificate_(require_client_certificate) {}

  std::shared_ptr<grpc::ServerCredentials> ServerCredentials(
      std::shared_ptr<grpc::AuthMetadataProcessor> guard) const override {
    grpc::SslServerCredentialsOptions options(
        require_client_certificate_ ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                    : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
    options.pem_root_certs = files_.ca;
    options.pem_key_cert_pairs.push_back({files_.key, files_.certificate});
    auto credentials = grpc::SslServerCredentials(options);
    if (guard != nullptr) credentials->SetAuthMetadataProcessor(std::move(guard));
    return credentials;
  }
  std::shared_ptr<grpc::ChannelCredentials> ChannelCredentials() const override {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = files_.ca;
    // Shown to processes that ask for one.
    options.pem_private_key = files_.key;
    options.pem_cert_chain = files_.certificate;
    return grpc::SslCredentials(options);
  }
  std::optional<ops::HttpTls> Http() const override {
    return ops::HttpTls{.certificate = files_.certificate,
                        .key = files_.key,
                        .client_ca = require_client_certificate_ ? files_.ca : ""};
  }

 private:
  const config::PemFiles files_;
  const bool require_client_certificate_;
};

}  // namespace

std::unique_ptr<TransportSecurity> MakePlainTransport() {
  return std::make_unique<PlainTransport>();
}

absl::StatusOr<std::unique_ptr<TransportSecurity>> MakeTlsTransport(const v1::TlsConfig& config) {
  absl::StatusOr<config::PemFiles> files =
      config::LoadPemFiles({.certificate_field = "security.tls.certificate_file",
                            .certificate_file = config.certificate_file(),
                            .key_field = "security.tls.key_file",
                            .key_file = config.key_file(),
                            .ca_field = "security.tls.ca_file",
                            .ca_file = config.ca_file()});
  if (!files.ok()) return files.status();
  if (files->days_left < kWarnDays) {
    ops::Log(ops::LogLevel::kWarning,
             files->days_left < 0 ? "the certificate has expired: clients will refuse it"
                                  : "the certificate expires soon",
             {{"file", config.certificate_file()}, {"days_left", files->days_left}});
  }
  return std::make_unique<TlsTransport>(*std::move(files), config.require_client_certificate());
}

Protection ProtectionOf(const v1::SecurityConfig& security) {
  if (!security.has_tls()) return Protection::kNone;
  const bool closed =
      security.tls().require_client_certificate() || !security.tokens_file().empty();
  return closed ? Protection::kClosed : Protection::kEncrypted;
}

absl::Status CheckBindAllowed(const std::string& field, const std::string& address,
                              Protection protection, bool insecure) {
  const absl::StatusOr<config::Address> parsed = config::ParseAddress(address);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": \"", address, "\" is not allowed; ", parsed.status().message()));
  }
  if (insecure || protection == Protection::kClosed || parsed->is_loopback()) {
    return absl::OkStatus();
  }
  const char* const lack = protection == Protection::kNone
                               ? "traffic is not encrypted; use 127.0.0.1, or security.tls with "
                                 "require_client_certificate or security.tokens_file"
                               : "anybody may call; use security.tls.require_client_certificate or "
                                 "security.tokens_file";
  return absl::InvalidArgumentError(absl::StrCat(field, ": \"", address,
                                                 "\" is not on the loopback interface, and ", lack,
                                                 ", or --insecure on a network that you trust"));
}

}  // namespace emberd::security
