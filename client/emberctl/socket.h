// A TCP connection with a time limit, and TLS on top of it, for finding out what listens somewhere.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/file_descriptor.h"
#include "client/cpp/options.h"
#include "config/address.h"

namespace emberd::emberctl {

// UNAVAILABLE says why not, in words.
absl::StatusOr<FileDescriptor> ConnectTo(const config::Address& address, absl::Duration timeout);

// Sends `request` and gives the first bytes of the answer; nothing if there is none in time.
std::string Exchange(int socket, absl::string_view request, absl::Duration timeout);

// A TLS handshake with the options' certificates. Why it fails, in words; empty if it does not.
std::string TlsFault(int socket, const client::TlsOptions& tls, const std::string& host,
                     absl::Duration timeout);

}  // namespace emberd::emberctl
