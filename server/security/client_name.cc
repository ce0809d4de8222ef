#include "server/security/client_name.h"

#include <memory>
#include <vector>

#include <grpcpp/security/auth_context.h>

#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"

namespace emberd::security {

std::string ClientName(const grpc::ServerContextBase& context) {
  const std::shared_ptr<const grpc::AuthContext> caller = context.auth_context();
  if (caller != nullptr) {
    const std::vector<grpc::string_ref> names = caller->FindPropertyValues(kClientNameProperty);
    if (!names.empty()) return std::string(names.front().data(), names.front().size());
  }
  return PeerAddress(context.peer());
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
