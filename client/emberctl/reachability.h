// Why a coordinator cannot be talked to, and what was probably meant: gRPC alone says little, and
// late.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/options.h"

namespace emberd::emberctl {

// WrongUsage() if an address is not host:port: a URL, or without a port.
absl::Status CheckAddresses(const client::ClientOptions& options);

// OK if something accepts connections at one of the addresses. UNAVAILABLE, at once where the
// machine answers at once, says of each address why not.
absl::Status CheckListening(const client::ClientOptions& options, absl::Duration timeout);

// What listens at an address that accepts connections but does not become a channel of gRPC: a web
// server, a server that wants TLS or does not, a certificate that is not trusted. Empty if nothing
// is found.
std::string WhatListens(const client::ClientOptions& options, const std::string& address,
                        absl::Duration timeout);

// The error of a call, with what was probably meant: another port, a token, a longer time.
absl::Status WithAdvice(const absl::Status& status, const client::ClientOptions& options);

}  // namespace emberd::emberctl
