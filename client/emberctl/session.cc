#include "client/emberctl/session.h"

#include <utility>

#include "client/cpp/options.h"

namespace emberd::emberctl {

absl::Status Session::Call(client::Transport::Attempt attempt) {
  if (transport_ == nullptr) {
    client::ClientOptions options;
    options.addresses = addresses;
    options.connect_timeout = options.deadline = absl::Seconds(timeout_seconds);
    if (absl::Status status = options.Validate(); !status.ok()) return status;
    absl::StatusOr<std::unique_ptr<client::Transport>> transport =
        client::Transport::Connect(options);
    if (!transport.ok()) return transport.status();
    transport_ = *std::move(transport);
  }
  return transport_->Call({}, attempt);
}

}  // namespace emberd::emberctl
