#include "client/cpp/credentials.h"

#include "absl/strings/str_cat.h"
#include "config/address.h"
#include "config/credentials.h"

namespace emberd::client {
namespace {

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> ChannelCredentials(
    const TlsOptions& tls) {
  absl::StatusOr<config::PemFiles> files =
      config::LoadPemFiles({.certificate_field = "ClientOptions.tls.certificate_file",
                            .certificate_file = tls.certificate_file,
                            .key_field = "ClientOptions.tls.key_file",
                            .key_file = tls.key_file,
                            .ca_field = "ClientOptions.tls.ca_file",
                            .ca_file = tls.ca_file});
  if (!files.ok()) return files.status();
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = files->ca;
  options.pem_private_key = files->key;
  options.pem_cert_chain = files->certificate;
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
    const absl::Status status = config::CheckToken("ClientOptions.token", options.token);
    if (!status.ok()) return status;
  }
  return options.token;
}

}  // namespace

absl::StatusOr<Credentials> LoadCredentials(const ClientOptions& options) {
  Credentials credentials{.channel = grpc::InsecureChannelCredentials(), .authorization = ""};
  if (options.tls.has_value()) {
    auto channel = ChannelCredentials(*options.tls);
    if (!channel.ok()) return channel.status();
    credentials.channel = *std::move(channel);
  }
  const absl::StatusOr<std::string> token = Token(options);
  if (!token.ok()) return token.status();
  if (token->empty()) return credentials;
  if (absl::Status status = CheckPrivate(options); !status.ok()) return status;
  credentials.authorization = absl::StrCat("Bearer ", *token);
  return credentials;
}

}  // namespace emberd::client
