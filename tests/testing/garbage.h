// Bytes that are no request, and a way to send them.
#pragma once

#include <random>
#include <string>

#include <grpcpp/generic/generic_stub.h>

#include "absl/time/time.h"

namespace emberd::testing {

std::string RandomBytes(std::mt19937& random, size_t size);

// Sends one message to a method ("/package.Service/Method"), whatever its kind; gives the code.
// `place`: what a call to a shard must say, see ShardPlace; empty: not sent.
grpc::StatusCode SendMessage(grpc::GenericStub& stub, const std::string& method,
                             const std::string& message, absl::Duration deadline,
                             const std::string& place = "");

}  // namespace emberd::testing
