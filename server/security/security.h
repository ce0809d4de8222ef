// Who may connect to a process, how bytes travel, and what it shows to others; and who calls: the
// holders of tokens, and the name of whoever made a call, for quotas, for logs, and for what
// depends on more than the method. A process makes one Security, and a CredentialsWatch that has it
// read its files again when they change.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/periodic_task.h"
#include "emberd/v1/cluster.pb.h"
#include "server/ops/http.h"
#include "server/ops/logging.h"
#include "server/ops/metrics.h"
#include "server/security/transport_security.h"

namespace grpc {
class AuthMetadataProcessor;
class Channel;
class ChannelArguments;
class ServerContextBase;
class ServerCredentials;
}  // namespace grpc

namespace emberd::security {

// A value that some read while another one takes its place. Thread-safe.
template <typename T>
class Replaceable {
 public:
  explicit Replaceable(T value = T()) : value_(std::move(value)) {}
  T Get() const {
    absl::MutexLock lock(&mutex_);
    return value_;
  }
  void Set(T value) {
    absl::MutexLock lock(&mutex_);
    value_ = std::move(value);
  }

 private:
  mutable absl::Mutex mutex_;
  T value_ ABSL_GUARDED_BY(mutex_);
};

// ---- Who calls

struct Caller {
  std::string name;
  v1::Token::Role role = v1::Token::ROLE_UNSPECIFIED;
};

// READER < TRAINER < LOADER < ADMIN. CLUSTER suffices for CLUSTER alone, and nothing else does.
bool Suffices(v1::Token::Role role, v1::Token::Role least);

// Thread-safe. Knows digests only: nobody can read a token out of it.
class TokenTable {
 public:
  explicit TokenTable(const v1::TokenFile& file);  // complete (config::CompleteTokenFile)

  // Who holds `token`, for as long as the table lives; null: nobody. How long it takes says nothing
  // about the tokens.
  const Caller* Find(absl::string_view token) const;

 private:
  struct Entry {
    std::string digest;  // in 64 lower-case hexadecimal digits
    Caller caller;
  };
  std::vector<Entry> entries_;
};

// The token in "Bearer TOKEN"; empty if the header is something else.
absl::string_view BearerToken(absl::string_view authorization);
// The token in "Basic ..." (RFC 7617), where it is the password; empty if the header is something
// else. Browsers ask people for these.
std::string BasicPassword(absl::string_view authorization);

// The name of the call's token. A call without one, or where tokens do not count: the address that
// it comes from, without the port ("127.0.0.1", "::1"), so that all connections of a machine are
// one client. Never empty.
std::string ClientName(const grpc::ServerContextBase& context);

// The same of a call that came another way, with this header, from this address.
std::string ClientName(absl::string_view authorization, const std::string& address);

// The role of the call's token: ADMIN where tokens do not count, ROLE_UNSPECIFIED of one that is
// not known.
v1::Token::Role RoleOf(const grpc::ServerContextBase& context);
v1::Token::Role RoleOf(absl::string_view authorization);

// From now on, in the whole process, tokens have names. Null: they do not count.
void NameClientsBy(std::shared_ptr<const TokenTable> tokens);

// The address in a gRPC peer name ("ipv4:127.0.0.1:7400", "ipv6:%5B::1%5D:7400", "unix:path"),
// without scheme and port. What is neither IPv4 nor IPv6 is given back whole; "" as "unknown".
std::string PeerAddress(absl::string_view peer);

// ---- What each method needs, and the check of every call and page against it

// The least role that may call each method, by "/package.Service/Method".
const absl::flat_hash_map<absl::string_view, v1::Token::Role>& MethodRoles();

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
  void SetTokens(std::shared_ptr<const TokenTable> tokens) { tokens_.Set(std::move(tokens)); }

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

  ops::Metrics* const metrics_;
  mutable RefusalLog refusals_;
  Replaceable<std::shared_ptr<const TokenTable>> tokens_;
};

// Makes gRPC call `check` when the headers of a call are there: what it refuses reaches no handler,
// and its message is not read. It leaves the metadata as it is.
//
// The name of the caller is not put into the AuthContext: gRPC has one per connection, which the
// calls on it share without a lock.
std::shared_ptr<grpc::AuthMetadataProcessor> MakeCallGuard(std::shared_ptr<const TokenCheck> check);

// Thread-safe. Made once in a process, for every port and every connection.
class Security {
 public:
  // Of a checked description. Reads all files that it names; INVALID_ARGUMENT or NOT_FOUND names
  // the field and the file that is wrong, FAILED_PRECONDITION that which the machine cannot read.
  // `metrics` must outlive it and counts what is refused; null: nothing is counted.
  static absl::StatusOr<std::shared_ptr<Security>> Create(const v1::SecurityConfig& config,
                                                          ops::Metrics* metrics = nullptr);

  // Reads the files again; what they hold counts for every call and every connection that is made
  // from now on. Connections that are there, and calls that have begun, go on. True: something has
  // changed. An error names what is wrong: where certificates are, they stay as they were, and so
  // do tokens.
  absl::StatusOr<bool> Reload();
  // Those files; none: there is nothing to read again.
  std::vector<std::string> Files() const;

  // For a gRPC port.
  std::shared_ptr<grpc::ServerCredentials> ServerCredentials() const;
  // A connection to another process of the cluster, which sends `metadata` and the cluster's token
  // with each call.
  using Metadata = std::vector<std::pair<std::string, std::string>>;
  std::shared_ptr<grpc::Channel> Connect(const std::string& address,
                                         const grpc::ChannelArguments& arguments,
                                         Metadata metadata = {}) const;
  // What ServerCredentials checks of each call, for calls that come another way.
  absl::Status CheckCall(const CallHeaders& call) const;
  // The header "authorization" with the cluster's token of now; empty without tokens.
  std::string OwnAuthorization() const;
  // For the web server: fills in `tls` and `admit`.
  void Protect(ops::HttpOptions* options) const;

 private:
  struct Tokens;

  explicit Security(v1::SecurityConfig config) : config_(std::move(config)) {}
  absl::StatusOr<bool> ReloadTokens() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const v1::SecurityConfig config_;
  std::unique_ptr<TransportSecurity> tls_;  // null: plain text
  std::shared_ptr<TokenCheck> tokens_;      // null: no tokens
  // The token that this process shows to others of the cluster; null with `tokens_`.
  std::shared_ptr<Replaceable<std::string>> cluster_token_;
  absl::Mutex mutex_;                               // one Reload at a time
  std::string token_file_ ABSL_GUARDED_BY(mutex_);  // what was read last, as text
};

// Certificates and tokens that are renewed while a process serves: reloads `security` when its
// files change, and when it is told to, and says in the log what came of it. A file is read when it
// has been the same for one look: who renews a certificate writes two files, and not at once.
class CredentialsWatch {
 public:
  static constexpr absl::Duration kEvery = absl::Seconds(1);
  static constexpr absl::Duration kAtLeast = absl::Hours(24);

  // `changed` is called, by a thread of the watch, after the files were read. What the arguments
  // point to must outlive it. The same files are read after `at_least`: certificates run out.
  CredentialsWatch(Security* security, std::function<void()> changed, absl::Duration every = kEvery,
                   absl::Duration at_least = kAtLeast);

  // Now, although no file may have changed. Does not wait.
  void ReloadSoon();

 private:
  void Look();
  // Whether to reload now; `asked`: somebody wants it.
  bool IsTime(bool asked);
  void Reload(bool asked);

  Security* const security_;
  const std::function<void()> changed_;
  const absl::Duration at_least_;
  const std::vector<std::string> files_;
  std::string read_;     // the marks when they were read; none: read them soon
  std::string seen_;     // at the last look
  absl::Time due_;       // to be read although they are the same
  bool broken_ = false;  // what was read last could not be used
  std::atomic<bool> asked_ = false;
  PeriodicTask looks_;  // goes first
};

}  // namespace emberd::security
