#include "client/emberctl/reachability.h"

#include <cerrno>
#include <memory>
#include <optional>
#include <system_error>
#include <vector>

#include <arpa/inet.h>
#include <netdb.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/file_descriptor.h"
#include "base/status.h"
#include "client/emberctl/output.h"
#include "config/address.h"

namespace emberd::emberctl {
namespace {

// A TCP connection with a time limit, and TLS on top of it, for finding out what listens somewhere.

// Host of an address as resolvers and certificates have it: without the brackets of IPv6.
std::string BareHost(absl::string_view host) {
  absl::ConsumePrefix(&host, "[");
  absl::ConsumeSuffix(&host, "]");
  return std::string(host);
}

// Connecting, and each call of send and receive later, waits for `timeout` at most.
absl::StatusOr<FileDescriptor> ConnectOne(const addrinfo& to, absl::Duration timeout) {
  FileDescriptor connection(socket(to.ai_family, to.ai_socktype | SOCK_CLOEXEC, to.ai_protocol));
  if (connection.get() < 0) return absl::UnavailableError("cannot create a socket");
  const timeval limit = absl::ToTimeval(timeout);
  setsockopt(connection.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  setsockopt(connection.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  if (connect(connection.get(), to.ai_addr, to.ai_addrlen) == 0) return connection;
  if (errno == ECONNREFUSED) {
    return absl::UnavailableError("nothing listens there (connection refused)");
  }
  if (errno == EINPROGRESS || errno == ETIMEDOUT) {  // the former at the limit
    return absl::UnavailableError("the machine does not answer");
  }
  return absl::UnavailableError(std::generic_category().message(errno));
}

using Context = std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)>;
using Connection = std::unique_ptr<SSL, decltype(&SSL_free)>;

void Expect(SSL* connection, const std::string& host) {
  in6_addr binary{};
  const bool is_ip = inet_pton(AF_INET, host.c_str(), &binary) == 1 ||
                     inet_pton(AF_INET6, host.c_str(), &binary) == 1;
  X509_VERIFY_PARAM* const wanted = SSL_get0_param(connection);
  if (is_ip) {
    X509_VERIFY_PARAM_set1_ip_asc(wanted, host.c_str());
  } else {
    X509_VERIFY_PARAM_set1_host(wanted, host.c_str(), host.size());
    SSL_set_tlsext_host_name(connection, host.c_str());
  }
}

// What the handshake, or the first read after it, has failed with.
std::string FaultOf(SSL* connection, bool has_certificate) {
  if (const long verified = SSL_get_verify_result(connection); verified != X509_V_OK) {
    const std::string why = X509_verify_cert_error_string(verified);
    return absl::StrCat(
        "its certificate is not trusted: ", why,
        verified == X509_V_ERR_CERT_HAS_EXPIRED
            ? "; whoever runs the coordinator must renew it"
            : "; give the authority that signed it with --ca, and connect to a host "
              "that it names");
  }
  const char* const text = ERR_reason_error_string(ERR_peek_last_error());
  const std::string reason = text == nullptr ? "" : text;
  if (absl::StrContains(reason, "wrong version number")) {
    return "it does not speak TLS; omit --ca, --cert and --key (and unset EMBERD_CA)";
  }
  if (absl::StrContains(reason, "certificate required") ||
      absl::StrContains(reason, "handshake failure")) {
    return "it requires a client certificate; give one with --cert and --key";
  }
  if (absl::StrContains(reason, "expired")) {
    return "it says that the certificate of --cert has expired; make a new one";
  }
  if (absl::StrContains(reason, "unknown ca") || absl::StrContains(reason, "bad certificate")) {
    return "it does not trust the certificate of --cert; use one that its authority has signed";
  }
  if (absl::StrContains(reason, "unexpected eof")) {
    return has_certificate
               ? "it closed the connection, probably because it does not trust the certificate of "
                 "--cert; use one that its authority has signed"
               : "it closed the connection, probably because it requires a client certificate; "
                 "give one with --cert and --key";
  }
  return reason.empty() ? "" : absl::StrCat("the TLS handshake failed: ", reason);
}

// UNAVAILABLE says why not, in words.
absl::StatusOr<FileDescriptor> ConnectTo(const config::Address& address, absl::Duration timeout) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(BareHost(address.host).c_str(),
                                std::to_string(address.port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::UnavailableError(
        absl::StrCat("the host \"", address.host, "\" is not known (", gai_strerror(error), ")"));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  absl::StatusOr<FileDescriptor> connection = absl::UnavailableError("it has no address");
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    connection = ConnectOne(*one, timeout);
    if (connection.ok()) break;
  }
  return connection;
}

// Sends `request` and gives the first bytes of the answer: empty if it hangs up, none if silent.
std::optional<std::string> Exchange(int socket, absl::string_view request) {
  if (send(socket, request.data(), request.size(), MSG_NOSIGNAL) < 0) return "";
  char answer[256];
  const ssize_t size = recv(socket, answer, sizeof(answer), 0);
  if (size < 0 && errno == EAGAIN) return std::nullopt;
  return size > 0 ? std::string(answer, static_cast<size_t>(size)) : "";
}

// A TLS handshake with the options' certificates. Why it fails, in words; empty if it does not.
std::string TlsFault(int socket, const client::TlsOptions& tls, const std::string& host) {
  ERR_clear_error();
  const bool has_certificate = !tls.certificate_file.empty();
  const Context context(SSL_CTX_new(TLS_client_method()), SSL_CTX_free);
  if (tls.ca_file.empty()) {
    SSL_CTX_set_default_verify_paths(context.get());
  } else {
    SSL_CTX_load_verify_locations(context.get(), tls.ca_file.c_str(), nullptr);
  }
  if (has_certificate) {
    SSL_CTX_use_certificate_chain_file(context.get(), tls.certificate_file.c_str());
    SSL_CTX_use_PrivateKey_file(context.get(), tls.key_file.c_str(), SSL_FILETYPE_PEM);
  }
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  // In the form of the protocol: each name after its length.
  constexpr unsigned char kHttp2[] = {2, 'h', '2'};
  SSL_CTX_set_alpn_protos(context.get(), kHttp2, sizeof(kHttp2));
  const Connection connection(SSL_new(context.get()), SSL_free);
  SSL_set_fd(connection.get(), socket);
  Expect(connection.get(), tls.server_name.empty() ? BareHost(host) : tls.server_name);
  std::string fault;
  if (SSL_connect(connection.get()) != 1) {
    fault = FaultOf(connection.get(), has_certificate);
  } else {
    // With TLS 1.3, the server's word on the client's certificate comes after the handshake.
    char byte = 0;
    if (SSL_read(connection.get(), &byte, 1) <= 0)
      fault = FaultOf(connection.get(), has_certificate);
  }
  ERR_clear_error();
  return fault;
}

constexpr char kHttpRequest[] = "GET / HTTP/1.1\r\nHost: emberd\r\nConnection: close\r\n\r\n";

// First bytes of a TLS record that holds an alert: what a TLS server says to plain text.
bool IsTlsAlert(absl::string_view answer) {
  return answer.size() >= 2 && answer[0] == 0x15 && answer[1] == 0x03;
}

}  // namespace

absl::Status CheckAddresses(const client::ClientOptions& options) {
  for (const std::string& text : options.addresses) {
    if (absl::StrContains(text, "://")) {
      return WrongUsage(absl::StrCat(
          "--address: \"", text,
          "\" is a URL; --address takes host:port alone, that of a coordinator's gRPC port, for "
          "example 127.0.0.1:7400. For TLS, add --ca FILE"));
    }
    const absl::StatusOr<config::Address> address = config::ParseAddress(text);
    if (!address.ok() || address->port == 0) {
      return WrongUsage(absl::StrCat(
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
  if (options.tls.has_value()) return TlsFault(connection->get(), *options.tls, parsed->host);
  const std::optional<std::string> answer = Exchange(connection->get(), kHttpRequest);
  if (!answer.has_value()) return "";  // as a coordinator that has too much to do, or is stopped
  if (absl::StartsWith(*answer, "HTTP/")) {
    return "this is a web server, perhaps the status page; the coordinator's gRPC port is another, "
           "7400 unless configured otherwise";
  }
  if (IsTlsAlert(*answer)) {
    return "it requires TLS; give --ca FILE with the authority that signed its certificate (and "
           "--cert and --key if it requires a client certificate)";
  }
  if (answer->empty()) {
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
    case absl::StatusCode::kDeadlineExceeded:
      if (status.message() != "Deadline Exceeded") return status;  // a server's words say more
      return with(absl::StrCat(
          absl::StrJoin(options.addresses, " or "), " did not answer within the --timeout of ",
          absl::ToDoubleSeconds(options.deadline),
          " s. If a shard is silent, `emberctl status --timeout 10` names it; else wait longer"));
    default:
      return status;
  }
}

}  // namespace emberd::emberctl
