#include "client/cpp/credentials.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include <grpc/support/log.h>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "config/address.h"
#include "config/credentials.h"

namespace emberd::client {
namespace {

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ChannelCredentials(
    const TlsOptions& tls) {
  ASSIGN_OR_RETURN(const config::PemFiles files,
                   config::LoadPemFiles({.certificate_field = "ClientOptions.tls.certificate_file",
                                         .certificate_file = tls.certificate_file,
                                         .key_field = "ClientOptions.tls.key_file",
                                         .key_file = tls.key_file,
                                         .ca_field = "ClientOptions.tls.ca_file",
                                         .ca_file = tls.ca_file}));
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = files.ca;
  options.pem_private_key = files.key;
  options.pem_cert_chain = files.certificate;
  return grpc::SslCredentials(options);
}

// Whoever listens on the way reads a token that travels in plain text.
absl::Status CheckPrivate(const ClientOptions& options) {
  if (options.tls.has_value()) return absl::OkStatus();
  for (const std::string& text : options.addresses) {
    const absl::StatusOr<config::Address> address = config::ParseAddress(text);
    if (address.ok() && address->is_loopback()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("ClientOptions.token: \"", text,
                     "\" is not on the loopback interface, where the token would travel in plain "
                     "text; ClientOptions.tls is needed"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Token(const ClientOptions& options) {
  if (!options.token_file.empty()) {
    return config::LoadToken("ClientOptions.token_file", options.token_file);
  }
  if (!options.token.empty()) {
    RETURN_IF_ERROR(config::CheckToken("ClientOptions.token", options.token));
  }
  return options.token;
}

std::string TlsMarks(const ClientOptions& options) {
  if (!options.tls.has_value()) return "";
  return config::FileMarks(
      {options.tls->ca_file, options.tls->certificate_file, options.tls->key_file});
}

}  // namespace

CredentialFiles::CredentialFiles(const ClientOptions& options)
    : options_(options), tls_(TlsMarks(options)), token_(config::FileMarks({options.token_file})) {}

std::optional<Credentials> CredentialFiles::Renewed() {
  const absl::Time now = SteadyNow();
  if (now < next_look_) return std::nullopt;
  next_look_ = now + kEvery;
  std::string tls = TlsMarks(options_);
  std::string token = config::FileMarks({options_.token_file});
  if (tls == tls_ && token == token_) return std::nullopt;
  absl::StatusOr<Credentials> read = LoadCredentials(options_);
  if (!read.ok()) {
    if (now >= next_complaint_) {
      next_complaint_ = now + absl::Minutes(1);
      gpr_log(GPR_ERROR,
              "emberd: certificates or tokens cannot be read: the old ones stay in use: %s",
              std::string(read.status().message()).c_str());
    }
    return std::nullopt;
  }
  channel_changed_ = tls != tls_;
  tls_ = std::move(tls);
  token_ = std::move(token);
  return *std::move(read);
}

absl::StatusOr<Credentials> LoadCredentials(const ClientOptions& options) {
  Credentials credentials{.channel = grpc::InsecureChannelCredentials(), .authorization = ""};
  if (options.tls.has_value()) {
    ASSIGN_OR_RETURN(credentials.channel, ChannelCredentials(*options.tls));
  }
  ASSIGN_OR_RETURN(const std::string token, Token(options));
  if (token.empty()) return credentials;
  RETURN_IF_ERROR(CheckPrivate(options));
  credentials.authorization = absl::StrCat("Bearer ", token);
  return credentials;
}

void LimitGrpcLog() {
  static const bool limited = [] {
    if (std::getenv("GRPC_VERBOSITY") != nullptr) return false;
    gpr_set_log_function([](gpr_log_func_args* args) {
      static std::atomic<int64_t> next_second = 0;
      const int64_t now = absl::ToUnixSeconds(SteadyNow());
      int64_t due = next_second;
      if (now < due || !next_second.compare_exchange_strong(due, now + 60)) return;
      std::fprintf(stderr, "emberd: %s\n", args->message);
    });
    return true;
  }();
  static_cast<void>(limited);
}

}  // namespace emberd::client
