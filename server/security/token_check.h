// What each method needs, and the check of every call and page against it.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/mutex.h"
#include "emberd/v1/cluster.pb.h"
#include "server/ops/logging.h"
#include "server/ops/metrics.h"
#include "server/security/callers.h"

namespace grpc {
class AuthMetadataProcessor;
}  // namespace grpc

namespace emberd::security {

struct MethodRole {
  absl::string_view method;  // "/package.Service/Method"
  v1::Token::Role role;      // the least that may call it
};

absl::Span<const MethodRole> MethodRoles();

// True for health checks and reflection, which need no token.
bool IsOpen(absl::string_view method);
// Whether a token of `role` may call `method`: its least role suffices, or coordinators ask each
// other by it (AdminService.GetStats).
bool MayCall(v1::Token::Role role, absl::string_view method);
// The least role for a method. One that is not in the table needs ADMIN, who then learns that it is
// not there.
v1::Token::Role LeastRole(absl::string_view method);

// What was refused. Parts that the caller chose are cut to kMaxText bytes.
struct Refusal {
  static constexpr size_t kMaxText = 100;

  absl::string_view method;  // or page
  absl::string_view reason;  // says nothing about the token
  absl::string_view client;  // name of the token or of the certificate, or address; empty: unknown
  absl::string_view agent;   // what the caller says that it is; empty: nothing
};

// Thread-safe. One line per minute for the same refusal, with the number of those left out.
class RefusalLog {
 public:
  void Add(const Refusal& refusal);

 private:
  ops::KeyedLog log_{absl::Minutes(1)};
};

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
      : metrics_(metrics), tokens_(std::move(tokens)) {}

  // From now on, these count and no others.
  void SetTokens(std::shared_ptr<const TokenTable> tokens) ABSL_LOCKS_EXCLUDED(mutex_);

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

  std::shared_ptr<const TokenTable> tokens() const ABSL_LOCKS_EXCLUDED(mutex_);

  ops::Metrics* const metrics_;
  const std::unique_ptr<RefusalLog> refusals_ = std::make_unique<RefusalLog>();
  mutable Mutex mutex_;
  std::shared_ptr<const TokenTable> tokens_ ABSL_GUARDED_BY(mutex_);
};

// Makes gRPC call `check` when the headers of a call are there: what it refuses reaches no handler,
// and its message is not read. It leaves the metadata as it is.
//
// The name of the caller is not put into the AuthContext: gRPC has one per connection, which the
// calls on it share without a lock.
std::shared_ptr<grpc::AuthMetadataProcessor> MakeCallGuard(std::shared_ptr<const TokenCheck> check);

}  // namespace emberd::security
