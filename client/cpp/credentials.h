// What a client shows to servers, and what it asks of them. Internal to the client.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <grpcpp/security/credentials.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
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

// The files that options name, which may be renewed while a client lives. Not thread-safe.
class CredentialFiles {
 public:
  static constexpr absl::Duration kEvery = absl::Seconds(1);

  // Create it before the files are read for the first time.
  explicit CredentialFiles(const ClientOptions& options);

  // What the files hold, if one has changed since the last look; nothing within kEvery of that
  // look. Files that cannot be used are read again at the next look; gRPC's log says so once a
  // minute.
  std::optional<Credentials> Renewed();
  // Whether it was more than the token that changed, the last time.
  bool channel_changed() const { return channel_changed_; }

 private:
  const ClientOptions options_;
  std::string tls_, token_;  // what says, without reading them, that files have changed
  bool channel_changed_ = false;
  absl::Time next_look_ = absl::InfinitePast();
  absl::Time next_complaint_ = absl::InfinitePast();
};

// gRPC writes a line for each connection that is tried in vain, twenty a second where a certificate
// is wrong. From now on it writes one a minute, unless the environment has GRPC_VERBOSITY. For
// whole programs, and for libraries that hide gRPC.
void LimitGrpcLog();

}  // namespace emberd::client
