// Holds the token of every call and page against the role that it needs.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/security/auth_metadata_processor.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/ops/metrics.h"
#include "server/security/refusal_log.h"
#include "server/security/token_table.h"

namespace emberd::security {

// What is known of a call before its message is read. gRPC does not tell the address.
struct CallHeaders {
  absl::string_view method;                      // "/package.Service/Method"
  std::vector<absl::string_view> authorization;  // every header of this name
  // For the log: what the client says that it is, and the name in its certificate; may be empty.
  absl::string_view agent = {};
  absl::string_view certificate = {};
};

// Thread-safe. Logs what it refuses.
class TokenCheck {
 public:
  // Refused calls are counted by `metrics`, which must outlive this; null: nowhere.
  explicit TokenCheck(std::shared_ptr<const TokenTable> tokens, ops::Metrics* metrics = nullptr)
      : tokens_(std::move(tokens)), metrics_(metrics) {}

  // UNAUTHENTICATED without a token that is known, PERMISSION_DENIED with one whose role does not
  // suffice; the message names what is needed.
  absl::Status CheckCall(const CallHeaders& call) const;
  // The same for a page of the web server, which READER and above may see; the token may also be
  // the password of HTTP's Basic scheme. `peer`: for the log.
  absl::Status CheckPage(absl::string_view path, absl::string_view authorization,
                         absl::string_view peer) const;

 private:
  // Says to everybody who has to know that a call is refused.
  absl::Status Refuse(absl::StatusCode code, const CallHeaders& call, absl::string_view client,
                      absl::string_view reason) const;

  const std::shared_ptr<const TokenTable> tokens_;
  ops::Metrics* const metrics_;
  const std::unique_ptr<RefusalLog> refusals_ = std::make_unique<RefusalLog>();
};

// Makes gRPC call `check` when the headers of a call are there: what it refuses reaches no handler,
// and its message is not read. It leaves the metadata as it is.
//
// The name of the caller is not put into the AuthContext: gRPC has one per connection, which the
// calls on it share without a lock.
std::shared_ptr<grpc::AuthMetadataProcessor> MakeCallGuard(std::shared_ptr<const TokenCheck> check);

}  // namespace emberd::security
