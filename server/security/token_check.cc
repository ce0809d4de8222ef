#include "server/security/token_check.h"

#include <utility>
#include <vector>

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_metadata_processor.h>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/ops/rpc_names.h"

namespace emberd::security {
namespace {

using v1::Token;

constexpr absl::string_view kStatsMethod = "/emberd.v1.AdminService/GetStats";
// Services between the processes of a cluster.
constexpr absl::string_view kInternal = "/emberd.internal.v1.";

constexpr MethodRole kMethodRoles[] = {
#define EMBERD_RPC(service, method, role) {"/emberd.v1." #service "Service/" #method, Token::role},
    EMBERD_PUBLIC_RPCS(EMBERD_RPC)
#undef EMBERD_RPC
};

constexpr char kNoToken[] = "no token; send \"authorization: Bearer TOKEN\" once";
constexpr char kUnknownToken[] = "the token is unknown";

// "EmbeddingService/Lookup" of "/emberd.v1.EmbeddingService/Lookup".
absl::string_view ShortName(absl::string_view method) {
  const size_t slash = method.rfind('/');
  const size_t dot = method.rfind('.', slash);
  return dot == absl::string_view::npos ? absl::StripPrefix(method, "/") : method.substr(dot + 1);
}

std::string LowRole(const Caller& caller, v1::Token::Role least) {
  return absl::StrCat("the role ", Token::Role_Name(least), " is needed; the token has the role ",
                      Token::Role_Name(caller.role));
}

absl::string_view View(const grpc::string_ref& text) { return {text.data(), text.size()}; }

class CallGuard final : public grpc::AuthMetadataProcessor {
 public:
  explicit CallGuard(std::shared_ptr<const TokenCheck> check) : check_(std::move(check)) {}

  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* connection,
                       OutputMetadata*, OutputMetadata*) override {
    CallHeaders call{.method = First(metadata, ":path"),
                     .authorization = {},
                     .agent = First(metadata, "user-agent"),
                     .certificate = {}};
    const auto [begin, end] = metadata.equal_range("authorization");
    for (auto header = begin; header != end; ++header) {
      call.authorization.push_back(View(header->second));
    }
    const auto names = connection->FindPropertyValues(GRPC_X509_CN_PROPERTY_NAME);
    if (!names.empty()) call.certificate = View(names.front());
    const absl::Status status = check_->CheckCall(call);
    return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
  }

 private:
  static absl::string_view First(const InputMetadata& metadata, const char* key) {
    const auto found = metadata.find(key);
    return found == metadata.end() ? absl::string_view() : View(found->second);
  }

  const std::shared_ptr<const TokenCheck> check_;
};

}  // namespace

absl::Span<const MethodRole> MethodRoles() { return kMethodRoles; }

bool IsOpen(absl::string_view method) {
  return absl::StartsWith(method, "/grpc.health.v1.Health/") ||
         absl::StartsWith(method, "/grpc.reflection.");
}

v1::Token::Role LeastRole(absl::string_view method) {
  if (absl::StartsWith(method, kInternal)) return Token::CLUSTER;
  static const auto* const roles = [] {
    auto* map = new absl::flat_hash_map<absl::string_view, Token::Role>;
    for (const MethodRole& entry : kMethodRoles) map->emplace(entry.method, entry.role);
    return map;
  }();
  const auto found = roles->find(method);
  return found == roles->end() ? Token::ADMIN : found->second;
}

bool MayCall(v1::Token::Role role, absl::string_view method) {
  return Suffices(role, LeastRole(method)) || (role == Token::CLUSTER && method == kStatsMethod);
}

void RefusalLog::Add(const Refusal& refusal) {
  const absl::string_view method = refusal.method.substr(0, Refusal::kMaxText);
  const absl::string_view client = refusal.client.substr(0, Refusal::kMaxText);
  const absl::string_view agent = refusal.agent.substr(0, Refusal::kMaxText);
  std::vector<ops::LogField> fields = {{"method", method}, {"reason", refusal.reason}};
  if (!client.empty()) fields.emplace_back("client", client);
  if (!agent.empty()) fields.emplace_back("agent", agent);
  log_.Log(absl::StrCat(method, "\n", refusal.reason, "\n", client, "\n", agent),
           ops::LogLevel::kWarning, "refused", std::move(fields));
}

void TokenCheck::SetTokens(std::shared_ptr<const TokenTable> tokens) {
  MutexLock lock(&mutex_);
  tokens_ = std::move(tokens);
}

std::shared_ptr<const TokenTable> TokenCheck::tokens() const {
  MutexLock lock(&mutex_);
  return tokens_;
}

absl::Status TokenCheck::CheckCall(const CallHeaders& call) const {
  if (IsOpen(call.method)) return absl::OkStatus();
  const std::shared_ptr<const TokenTable> tokens = this->tokens();
  const absl::string_view token =
      call.authorization.size() == 1 ? BearerToken(call.authorization.front()) : "";
  const Caller* const caller = token.empty() ? nullptr : tokens->Find(token);
  if (caller == nullptr) {
    return Refuse(absl::StatusCode::kUnauthenticated, call, call.certificate,
                  token.empty() ? kNoToken : kUnknownToken);
  }
  const v1::Token::Role least = LeastRole(call.method);
  if (MayCall(caller->role, call.method)) return absl::OkStatus();
  return Refuse(absl::StatusCode::kPermissionDenied, call, caller->name, LowRole(*caller, least));
}

absl::Status TokenCheck::Refuse(absl::StatusCode code, const CallHeaders& call,
                                absl::string_view client, absl::string_view reason) const {
  const absl::string_view name = ShortName(call.method);
  refusals_->Add({.method = name, .reason = reason, .client = client, .agent = call.agent});
  for (size_t i = 0; metrics_ != nullptr && i < ops::kRpcCount; ++i) {
    const auto rpc = static_cast<ops::Rpc>(i);
    const std::string_view known = ops::RpcName(rpc);
    if (name == absl::string_view(known.data(), known.size())) {
      metrics_->ObserveRpc(rpc, code, 0, 0, 0);
    }
  }
  return absl::Status(code, absl::StrCat(name, ": ", reason));
}

absl::Status TokenCheck::CheckPage(absl::string_view path, absl::string_view authorization,
                                   absl::string_view peer) const {
  const std::shared_ptr<const TokenTable> tokens = this->tokens();
  absl::string_view token = BearerToken(authorization);
  const std::string password = token.empty() ? BasicPassword(authorization) : "";
  if (token.empty()) token = password;
  const Caller* const caller = token.empty() ? nullptr : tokens->Find(token);
  if (caller == nullptr) {
    const absl::string_view reason =
        token.empty() ? "no token; send it as a bearer token, or as the password of any user"
                      : kUnknownToken;
    refusals_->Add({.method = path, .reason = reason, .client = peer, .agent = ""});
    return absl::UnauthenticatedError(reason);
  }
  if (Suffices(caller->role, v1::Token::READER)) return absl::OkStatus();
  const std::string reason = LowRole(*caller, v1::Token::READER);
  refusals_->Add({.method = path, .reason = reason, .client = caller->name, .agent = ""});
  return absl::PermissionDeniedError(reason);
}

std::shared_ptr<grpc::AuthMetadataProcessor> MakeCallGuard(
    std::shared_ptr<const TokenCheck> check) {
  return std::make_shared<CallGuard>(std::move(check));
}

}  // namespace emberd::security
