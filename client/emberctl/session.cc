#include "client/emberctl/session.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "client/cpp/coordinator.h"
#include "client/emberctl/reachability.h"

namespace emberd::emberctl {

Session Session::At(const std::string& address) const {
  Session one(out);
  static_cast<SessionOptions&>(one) = *this;
  one.addresses = {address};
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

void SilenceLibraries() {
  static const bool silent = [] {
    if (std::getenv("GRPC_VERBOSITY") != nullptr) return false;
    gpr_set_log_function([](gpr_log_func_args*) {});
    google::protobuf::SetLogHandler(nullptr);
    return true;
  }();
  static_cast<void>(silent);
}

namespace {

// The client library names its own options.
absl::Status WithOptionsOfEmberctl(const absl::Status& status) {
  return absl::Status(
      status.code(),
      absl::StrReplaceAll(status.message(), {{"ClientOptions.tls.certificate_file", "--cert"},
                                             {"ClientOptions.tls.key_file", "--key"},
                                             {"ClientOptions.tls.ca_file", "--ca"},
                                             {"ClientOptions.tls is needed", "give --ca FILE"},
                                             {"ClientOptions.token_file", "--token-file"},
                                             {"ClientOptions.token", "--token-file"}}));
}

}  // namespace

absl::Status Session::Connect() {
  client::ClientOptions options = client_options();
  RETURN_IF_ERROR(CheckAddresses(options));
  RETURN_IF_ERROR(options.Validate());
  RETURN_IF_ERROR(CheckListening(options, options.connect_timeout));
  const absl::Duration patience = options.connect_timeout;
  // What has not become a channel by now may be something else; it is asked what.
  constexpr absl::Duration kSoon = absl::Seconds(1);
  options.connect_timeout = std::min(patience, kSoon);
  absl::StatusOr<std::unique_ptr<client::Transport>> transport =
      client::Transport::Connect(options);
  if (absl::IsUnavailable(transport.status())) {
    std::vector<std::string> found;
    for (const std::string& address : addresses) {
      const std::string what = WhatListens(options, address, options.connect_timeout);
      if (!what.empty()) found.push_back(absl::StrCat(address, ": ", what));
    }
    if (found.size() == addresses.size()) {
      return absl::UnavailableError(absl::StrJoin(found, "; "));
    }
    options.connect_timeout = patience;
    transport = client::Transport::Connect(options);
  }
  RETURN_IF_ERROR(WithOptionsOfEmberctl(transport.status()));
  transport_ = *std::move(transport);
  return absl::OkStatus();
}

absl::Status Session::Advised(const absl::Status& status) const {
  return WithAdvice(status, client_options());
}

absl::Status Session::Call(client::Transport::Attempt attempt, absl::Duration deadline) {
  if (transport_ == nullptr) RETURN_IF_ERROR(Connect());
  return Advised(transport_->Call({deadline}, attempt));
}

absl::StatusOr<v1::CheckpointProgress> Session::CallWithProgress(
    const google::protobuf::Message& request, absl::Duration deadline,
    absl::FunctionRef<void(const v1::CheckpointProgress&)> progress) {
  if (transport_ == nullptr) RETURN_IF_ERROR(Connect());
  auto result = client::RunWithProgress(transport_.get(), request, deadline, progress);
  if (!result.ok()) return Advised(result.status());
  return result;
}

absl::StatusOr<v1::GetStatusResponse> Session::GetStatus() {
  return Call<v1::GetStatusResponse>(v1::GetStatusRequest());
}

absl::StatusOr<v1::DescribeModelResponse> Session::DescribeModel(const std::string& name) {
  v1::DescribeModelRequest request;
  request.set_name(name);
  return Call<v1::DescribeModelResponse>(request);
}

}  // namespace emberd::emberctl
