#include "client/emberctl/reachability.h"

#include <algorithm>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "client/emberctl/socket.h"
#include "config/address.h"

namespace emberd::emberctl {
namespace {

constexpr char kHttpRequest[] = "GET / HTTP/1.1\r\nHost: emberd\r\nConnection: close\r\n\r\n";

// First bytes of a TLS record that holds an alert: what a TLS server says to plain text.
bool IsTlsAlert(absl::string_view answer) {
  return answer.size() >= 2 && answer[0] == 0x15 && answer[1] == 0x03;
}

}  // namespace

absl::Status CheckAddresses(const client::ClientOptions& options) {
  for (const std::string& text : options.addresses) {
    if (absl::StrContains(text, "://")) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--address: \"", text,
          "\" is a URL; --address takes host:port alone, that of a coordinator's gRPC port, for "
          "example 127.0.0.1:7400. For TLS, add --ca FILE"));
    }
    const absl::StatusOr<config::Address> address = config::ParseAddress(text);
    if (!address.ok() || address->port == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--address: \"", text,
          "\" is not host:port with a port from 1 to 65535; for example 127.0.0.1:7400"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckListening(const client::ClientOptions& options, absl::Duration timeout) {
  std::vector<std::string> faults;
  for (const std::string& text : options.addresses) {
    ASSIGN_OR_RETURN(const config::Address address, config::ParseAddress(text));
    const absl::StatusOr<FileDescriptor> connection = ConnectTo(address, timeout);
    if (connection.ok()) return absl::OkStatus();
    faults.push_back(absl::StrCat(text, ": ", connection.status().message()));
  }
  return absl::UnavailableError(absl::StrCat(
      absl::StrJoin(faults, "; "),
      ". Is emberd running, and is this the gRPC address of a coordinator? `emberd up` prints it; "
      "give it with --address, or in EMBERD_ADDRESS"));
}

std::string WhatListens(const client::ClientOptions& options, const std::string& address,
                        absl::Duration timeout) {
  const absl::StatusOr<config::Address> parsed = config::ParseAddress(address);
  if (!parsed.ok()) return "";
  const absl::StatusOr<FileDescriptor> connection = ConnectTo(*parsed, timeout);
  if (!connection.ok()) return std::string(connection.status().message());
  if (options.tls.has_value()) {
    return TlsFault(connection->get(), *options.tls, parsed->host, timeout);
  }
  const std::string answer = Exchange(connection->get(), kHttpRequest, timeout);
  if (absl::StartsWith(answer, "HTTP/")) {
    return "this is a web server, perhaps the status page; the coordinator's gRPC port is another, "
           "7400 unless configured otherwise";
  }
  if (IsTlsAlert(answer)) {
    return "it requires TLS; give --ca FILE with the authority that signed its certificate (and "
           "--cert and --key if it requires a client certificate)";
  }
  if (answer.empty()) {
    return "it accepts connections but does not speak gRPC in plain text; if it requires TLS, give "
           "--ca FILE";
  }
  return "";
}

absl::Status WithAdvice(const absl::Status& status, const client::ClientOptions& options) {
  const auto with = [&status](absl::string_view advice) {
    absl::Status advised(status.code(), absl::StrCat(status.message(),
                                                     status.message().empty() ? "" : ". ", advice));
    status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
      advised.SetPayload(url, payload);
    });
    return advised;
  };
  switch (status.code()) {
    case absl::StatusCode::kUnimplemented:
      return with(
          "This is a gRPC server, but not a coordinator of this version of emberd. If it is a "
          "shard, use the address of a coordinator");
    case absl::StatusCode::kUnauthenticated:
      return with(
          options.token_file.empty()
              ? "Give the file that holds your token with --token-file, or in "
                "EMBERD_TOKEN_FILE"
              : "Check that --token-file names a file with a token that this cluster knows; "
                "`emberd token` makes one");
    case absl::StatusCode::kPermissionDenied:
      return with("Give a token of that role with --token-file; `emberd token` makes one");
    default:
      return status;
  }
}

}  // namespace emberd::emberctl
