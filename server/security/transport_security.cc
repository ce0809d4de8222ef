#include "server/security/transport_security.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <grpc/grpc.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <sys/mman.h>
#include <unistd.h>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "base/file_descriptor.h"
#include "base/status.h"
#include "config/address.h"
#include "config/credentials.h"
#include "server/ops/logging.h"

namespace emberd::security {
namespace {

constexpr int kWarnDays = 14;
constexpr unsigned kWatchSeconds = 1;

// A file that nobody else can open by name.
absl::StatusOr<FileDescriptor> MemoryFile(absl::string_view content) {
  FileDescriptor file(memfd_create("emberd-credentials", MFD_CLOEXEC));
  while (file.get() >= 0 && !content.empty()) {
    const ssize_t size = write(file.get(), content.data(), content.size());
    if (size < 0 && errno != EINTR) break;
    if (size > 0) content.remove_prefix(static_cast<size_t>(size));
  }
  if (file.get() < 0 || !content.empty()) {
    return absl::ErrnoToStatus(errno, "cannot hold certificates in memory");
  }
  return file;
}

// Key and certificate in one file, so that they always belong together.
std::string Identity(const config::PemFiles& files) {
  return absl::StrCat(files.certificate, "\n", files.key);
}

std::string PathOf(int fd) { return absl::StrCat("/proc/self/fd/", fd); }

absl::Status Replace(int fd, absl::string_view content) {
  ASSIGN_OR_RETURN(const FileDescriptor file, MemoryFile(content));
  if (dup3(file.get(), fd, O_CLOEXEC) < 0) {
    return absl::ErrnoToStatus(errno, "cannot replace certificates in memory");
  }
  return absl::OkStatus();
}

// Certificates, key and authorities that gRPC reads again while it serves.
//
// gRPC watches files, believes whatever it finds there, and refuses everybody when it is damaged or
// only half written. So it is given files in memory that are replaced as a whole, by what has been
// checked. Thread-safe, but for Set beside Set.
class RenewableFiles {
 public:
  static absl::StatusOr<std::unique_ptr<RenewableFiles>> Create(const config::PemFiles& files) {
    ASSIGN_OR_RETURN(FileDescriptor identity, MemoryFile(Identity(files)));
    ASSIGN_OR_RETURN(FileDescriptor authorities, MemoryFile(files.ca));
    return std::unique_ptr<RenewableFiles>(
        new RenewableFiles(identity.Release(), authorities.Release()));
  }

  ~RenewableFiles() {
    provider_ = nullptr;
    grpc_shutdown();
  }

  // For the credentials of ports and connections.
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider() const {
    return provider_;
  }
  // gRPC finds them within a second. An error: it keeps those that it has.
  absl::Status Set(const config::PemFiles& files) {
    RETURN_IF_ERROR(Replace(authorities_fd_, files.ca));
    return Replace(identity_fd_, Identity(files));
  }

 private:
  RenewableFiles(int identity_fd, int authorities_fd)
      : identity_fd_(identity_fd), authorities_fd_(authorities_fd) {
    grpc_init();
    provider_ = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
        PathOf(identity_fd), PathOf(identity_fd), PathOf(authorities_fd), kWatchSeconds);
  }

  // Never closed: gRPC reads them for as long as it has a port or a connection.
  const int identity_fd_;
  const int authorities_fd_;
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider_;
};

absl::StatusOr<config::PemFiles> LoadFiles(const v1::TlsConfig& config) {
  return config::LoadPemFiles({.certificate_field = "security.tls.certificate_file",
                               .certificate_file = config.certificate_file(),
                               .key_field = "security.tls.key_file",
                               .key_file = config.key_file(),
                               .ca_field = "security.tls.ca_file",
                               .ca_file = config.ca_file()});
}

class TlsTransport final : public TransportSecurity {
 public:
  // `renewable` holds what `files` does.
  TlsTransport(v1::TlsConfig config, config::PemFiles files,
               std::unique_ptr<RenewableFiles> renewable)
      : config_(std::move(config)), renewable_(std::move(renewable)), files_(std::move(files)) {
    WarnOfEnd(files_.days_left);
  }

  std::shared_ptr<grpc::ServerCredentials> ServerCredentials(
      std::shared_ptr<grpc::AuthMetadataProcessor> guard) const override {
    grpc::experimental::TlsServerCredentialsOptions options(renewable_->provider());
    options.watch_identity_key_cert_pairs();
    options.watch_root_certs();
    options.set_cert_request_type(mutual()
                                      ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                      : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
    auto credentials = grpc::experimental::TlsServerCredentials(options);
    if (guard != nullptr) credentials->SetAuthMetadataProcessor(std::move(guard));
    return credentials;
  }
  std::shared_ptr<grpc::ChannelCredentials> ChannelCredentials() const override {
    grpc::experimental::TlsChannelCredentialsOptions options;
    options.set_certificate_provider(renewable_->provider());
    options.watch_root_certs();
    options.watch_identity_key_cert_pairs();  // shown to processes that ask for one
    return grpc::experimental::TlsCredentials(options);
  }
  ops::HttpTls Http() const override {
    absl::MutexLock lock(&mutex_);
    return ops::HttpTls{.certificate = files_.certificate,
                        .key = files_.key,
                        .client_ca = mutual() ? files_.ca : ""};
  }
  absl::StatusOr<bool> Reload() override {
    ASSIGN_OR_RETURN(config::PemFiles files, LoadFiles(config_));
    absl::MutexLock lock(&mutex_);
    if (files.certificate == files_.certificate && files.key == files_.key &&
        files.ca == files_.ca) {
      WarnOfEnd(files.days_left);
      return false;
    }
    RETURN_IF_ERROR(renewable_->Set(files));
    files_ = std::move(files);
    warned_days_ = kWarnDays;
    WarnOfEnd(files_.days_left);
    return true;
  }

 private:
  bool mutual() const { return config_.require_client_certificate(); }

  // Once on each of the last days, and once when the certificate has ended.
  void WarnOfEnd(int days_left) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const int days = std::max(days_left, -1);
    if (days >= warned_days_) return;
    warned_days_ = days;
    ops::Log(ops::LogLevel::kWarning,
             days < 0 ? "the certificate has expired: clients will refuse it"
                      : "the certificate expires soon",
             {{"file", config_.certificate_file()}, {"days_left", days_left}});
  }

  const v1::TlsConfig config_;
  const std::unique_ptr<RenewableFiles> renewable_;
  mutable absl::Mutex mutex_;
  config::PemFiles files_ ABSL_GUARDED_BY(mutex_);
  int warned_days_ ABSL_GUARDED_BY(mutex_) = kWarnDays;  // left when it was said last
};

}  // namespace

absl::StatusOr<std::unique_ptr<TransportSecurity>> MakeTlsTransport(const v1::TlsConfig& config) {
  ASSIGN_OR_RETURN(config::PemFiles files, LoadFiles(config));
  ASSIGN_OR_RETURN(std::unique_ptr<RenewableFiles> renewable, RenewableFiles::Create(files));
  return std::make_unique<TlsTransport>(config, std::move(files), std::move(renewable));
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
