// What a client shows to servers, and what it asks of them. Internal to the client.
#pragma once

#include <memory>
#include <string>

#include <grpcpp/security/credentials.h>

#include "absl/status/statusor.h"
#include "client/cpp/options.h"

namespace emberd::client {

struct Credentials {
  std::shared_ptr<grpc::ChannelCredentials> channel;
  // Value of the metadata "authorization" of each call; empty: none.
  std::string authorization;
};

// Reads the files that valid options name. INVALID_ARGUMENT names the field and the file that is
// wrong.
absl::StatusOr<Credentials> LoadCredentials(const ClientOptions& options);

}  // namespace emberd::client
