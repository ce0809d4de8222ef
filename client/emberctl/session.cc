#include "client/emberctl/session.h"

#include <utility>

#include "base/status.h"
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
    RETURN_IF_ERROR(options.Validate());
    ASSIGN_OR_RETURN(std::unique_ptr<client::Transport> transport,
                     client::Transport::Connect(options));
    transport_ = std::move(transport);
  }
  return transport_->Call({}, attempt);
}

absl::StatusOr<v1::GetStatusResponse> Session::GetStatus() {
  v1::GetStatusResponse response;
  RETURN_IF_ERROR(Call([&](const client::Coordinator& coordinator, auto* context) {
    return coordinator.admin->GetStatus(context, {}, &response);
  }));
  return response;
}

absl::StatusOr<v1::DescribeModelResponse> Session::DescribeModel(const std::string& name) {
  v1::DescribeModelRequest request;
  request.set_name(name);
  v1::DescribeModelResponse response;
  RETURN_IF_ERROR(Call([&](const client::Coordinator& coordinator, auto* context) {
    return coordinator.embedding->DescribeModel(context, request, &response);
  }));
  return response;
}

}  // namespace emberd::emberctl
