#include "server/security/client_name.h"

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "server/security/method_roles.h"

namespace emberd::security {
namespace {

// The tokens of the process. Never destroyed: calls may be answered until the very end.
class ProcessTokens {
 public:
  static ProcessTokens& Get() {
    static auto* const tokens = new ProcessTokens;
    return *tokens;
  }
  std::shared_ptr<const TokenTable> table() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::ReaderMutexLock lock(&mutex_);
    return table_;
  }
  void Set(std::shared_ptr<const TokenTable> table) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    table_ = std::move(table);
  }

 private:
  absl::Mutex mutex_;
  std::shared_ptr<const TokenTable> table_ ABSL_GUARDED_BY(mutex_);
};

// Whose token the call carries; null if it carries none that is known.
const Caller* FindCaller(const TokenTable& tokens, const grpc::ServerContextBase& context) {
  const auto sent = context.client_metadata().find("authorization");
  if (sent == context.client_metadata().end()) return nullptr;
  return tokens.Find(BearerToken({sent->second.data(), sent->second.size()}));
}

}  // namespace

std::string ClientName(const grpc::ServerContextBase& context) {
  const std::shared_ptr<const TokenTable> tokens = ProcessTokens::Get().table();
  const Caller* const caller = tokens == nullptr ? nullptr : FindCaller(*tokens, context);
  return caller == nullptr ? PeerAddress(context.peer()) : caller->name;
}

bool MayTrain(const grpc::ServerContextBase& context) {
  const std::shared_ptr<const TokenTable> tokens = ProcessTokens::Get().table();
  if (tokens == nullptr) return true;
  const Caller* const caller = FindCaller(*tokens, context);
  return caller != nullptr && Suffices(caller->role, v1::Token::TRAINER);
}

void NameClientsBy(std::shared_ptr<const TokenTable> tokens) {
  ProcessTokens::Get().Set(std::move(tokens));
}

std::string PeerAddress(absl::string_view peer) {
  absl::string_view rest = peer;
  if (absl::ConsumePrefix(&rest, "ipv4:")) {
    return std::string(rest.substr(0, rest.rfind(':')));
  }
  if (absl::ConsumePrefix(&rest, "ipv6:")) {
    const std::string decoded =
        absl::StrReplaceAll(rest, {{"%5B", "["}, {"%5D", "]"}, {"%25", "%"}});
    const size_t open = decoded.find('[');
    const size_t close = decoded.rfind(']');
    if (open != std::string::npos && close != std::string::npos && open < close) {
      return decoded.substr(open + 1, close - open - 1);
    }
    return decoded;
  }
  return peer.empty() ? "unknown" : std::string(peer);
}

}  // namespace emberd::security
