// Who calls: the holders of tokens, and the name of whoever made a call, for quotas, for logs, and
// for what depends on more than the method.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "emberd/v1/cluster.pb.h"

namespace grpc {
class ServerContextBase;
}  // namespace grpc

namespace emberd::security {

// A value that some read while another one takes its place. Thread-safe.
template <typename T>
class Replaceable {
 public:
  explicit Replaceable(T value = T()) : value_(std::move(value)) {}
  T Get() const {
    MutexLock lock(&mutex_);
    return value_;
  }
  void Set(T value) {
    MutexLock lock(&mutex_);
    value_ = std::move(value);
  }

 private:
  mutable Mutex mutex_;
  T value_ ABSL_GUARDED_BY(mutex_);
};

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

}  // namespace emberd::security
