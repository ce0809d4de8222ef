#include "client/emberctl/session.h"

#include <utility>

#include "client/cpp/options.h"

namespace emberd::emberctl {

Session Session::At(const std::string& address) const {
  Session one(out);
  one.addresses = {address};
  one.json = json;
  one.timeout_seconds = timeout_seconds;
  one.ca_file = ca_file;
  one.certificate_file = certificate_file;
  one.key_file = key_file;
  one.token_file = token_file;
  return one;
}

client::ClientOptions Session::client_options() const {
  client::ClientOptions options;
  options.addresses = addresses;
  if (!ca_file.empty() || !certificate_file.empty() || !key_file.empty()) {
    options.tls = client::TlsOptions{
        .ca_file = ca_file, .certificate_file = certificate_file, .key_file = key_file};
  }
  options.token_file = token_file;
  options.connect_timeout = options.deadline = absl::Seconds(timeout_seconds);
  return options;
}

absl::Status Session::Call(client::Transport::Attempt attempt) {
  if (transport_ == nullptr) {
    const client::ClientOptions options = client_options();
    if (absl::Status status = options.Validate(); !status.ok()) return status;
    absl::StatusOr<std::unique_ptr<client::Transport>> transport =
        client::Transport::Connect(options);
    if (!transport.ok()) return transport.status();
    transport_ = *std::move(transport);
  }
  return transport_->Call({}, attempt);
}

}  // namespace emberd::emberctl
