#include "server/security/security.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/channel.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/channel_arguments.h>
#include <grpcpp/support/client_interceptor.h>
#include <openssl/crypto.h>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/steady_time.h"
#include "config/config.h"
#include "config/credentials.h"
#include "server/ops/catalogue.h"

namespace emberd::security {
namespace {

// What follows the name of the scheme and blanks; empty if the scheme is another one.
absl::string_view AfterScheme(absl::string_view authorization, absl::string_view scheme) {
  if (!absl::StartsWithIgnoreCase(authorization, scheme)) return "";
  const absl::string_view rest = authorization.substr(scheme.size());
  return absl::StartsWith(rest, " ") ? absl::StripAsciiWhitespace(rest) : "";
}

// The tokens of the process. Never destroyed: calls may be answered until the very end.
Replaceable<std::shared_ptr<const TokenTable>>& ProcessTokens() {
  static auto* const tokens = new Replaceable<std::shared_ptr<const TokenTable>>;
  return *tokens;
}

// Of the roles that rise; LOADER came later than its number in the description says.
int Rank(v1::Token::Role role) {
  switch (role) {
    case v1::Token::READER:
      return 1;
    case v1::Token::TRAINER:
      return 2;
    case v1::Token::LOADER:
      return 3;
    case v1::Token::ADMIN:
      return 4;
    default:
      return 0;
  }
}

// The call's header; empty if there is none.
absl::string_view Authorization(const grpc::ServerContextBase& context) {
  const auto sent = context.client_metadata().find("authorization");
  if (sent == context.client_metadata().end()) return "";
  return {sent->second.data(), sent->second.size()};
}

// Whose token it is; null if it is none that is known.
const Caller* FindCaller(const TokenTable& tokens, absl::string_view authorization) {
  return authorization.empty() ? nullptr : tokens.Find(BearerToken(authorization));
}

using v1::Token;

constexpr absl::string_view kStatsMethod = "/emberd.v1.AdminService/GetStats";
// Services between the processes of a cluster.
constexpr absl::string_view kInternal = "/emberd.internal.v1.";

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

using grpc::experimental::ClientInterceptorFactoryInterface;
using grpc::experimental::ClientRpcInfo;
using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::Interceptor;
using grpc::experimental::InterceptorBatchMethods;

// Adds to the metadata of every call of a channel. Call credentials would do the same, but not on a
// channel in plain text.
class MetadataSender final : public Interceptor {
 public:
  // What it is given must outlive it; `token` may be null.
  MetadataSender(const Security::Metadata& metadata, const std::function<std::string()>& token)
      : metadata_(metadata), token_(token) {}

  void Intercept(InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      auto* const sent = methods->GetSendInitialMetadata();
      sent->insert(metadata_.begin(), metadata_.end());
      if (token_) sent->emplace("authorization", absl::StrCat("Bearer ", token_()));
    }
    methods->Proceed();
  }

 private:
  const Security::Metadata& metadata_;
  const std::function<std::string()>& token_;
};

class MetadataSenderFactory final : public ClientInterceptorFactoryInterface {
 public:
  MetadataSenderFactory(Security::Metadata metadata, std::function<std::string()> token)
      : metadata_(std::move(metadata)), token_(std::move(token)) {}
  Interceptor* CreateClientInterceptor(ClientRpcInfo*) override {
    return new MetadataSender(metadata_, token_);
  }

 private:
  const Security::Metadata metadata_;
  const std::function<std::string()> token_;
};

// The cluster's token from its file, which must be in `table`: else the shards refuse it.
absl::StatusOr<std::string> LoadClusterToken(const v1::SecurityConfig& config,
                                             const TokenTable& table) {
  constexpr char kField[] = "security.cluster_token_file";
  absl::StatusOr<std::string> token = config::LoadToken(kField, config.cluster_token_file());
  if (!token.ok()) return token;
  const Caller* const caller = table.Find(*token);
  if (caller != nullptr && caller->role == v1::Token::CLUSTER) return token;
  return absl::InvalidArgumentError(absl::StrCat(
      kField, ": ", config.cluster_token_file(), ": the token ",
      caller == nullptr ? "is not"
                        : absl::StrCat("has the role ", v1::Token::Role_Name(caller->role)),
      " in ", config.tokens_file(), "; it must be there with the role CLUSTER"));
}

}  // namespace

bool Suffices(v1::Token::Role role, v1::Token::Role least) {
  if (role == v1::Token::CLUSTER || least == v1::Token::CLUSTER) return role == least;
  return Rank(role) >= Rank(least);
}

TokenTable::TokenTable(const v1::TokenFile& file) {
  for (const v1::Token& token : file.tokens()) {
    entries_.push_back({absl::AsciiStrToLower(token.sha256()), {token.name(), token.role()}});
  }
}

const Caller* TokenTable::Find(absl::string_view token) const {
  const std::string digest = Sha256Hex(token);
  const Caller* found = nullptr;
  // Through to the end: the time must not tell where the token stands.
  for (const Entry& entry : entries_) {
    if (entry.digest.size() == digest.size() &&
        CRYPTO_memcmp(digest.data(), entry.digest.data(), digest.size()) == 0) {
      found = &entry.caller;
    }
  }
  return found;
}

absl::string_view BearerToken(absl::string_view authorization) {
  return AfterScheme(authorization, "Bearer");
}

std::string BasicPassword(absl::string_view authorization) {
  std::string pair;
  if (!absl::Base64Unescape(AfterScheme(authorization, "Basic"), &pair)) return "";
  const size_t colon = pair.find(':');
  return colon == std::string::npos ? "" : pair.substr(colon + 1);
}

std::string ClientName(const grpc::ServerContextBase& context) {
  return ClientName(Authorization(context), PeerAddress(context.peer()));
}

std::string ClientName(absl::string_view authorization, const std::string& address) {
  const std::shared_ptr<const TokenTable> tokens = ProcessTokens().Get();
  const Caller* const caller = tokens == nullptr ? nullptr : FindCaller(*tokens, authorization);
  return caller == nullptr ? address : caller->name;
}

v1::Token::Role RoleOf(const grpc::ServerContextBase& context) {
  return RoleOf(Authorization(context));
}

v1::Token::Role RoleOf(absl::string_view authorization) {
  const std::shared_ptr<const TokenTable> tokens = ProcessTokens().Get();
  if (tokens == nullptr) return v1::Token::ADMIN;
  const Caller* const caller = FindCaller(*tokens, authorization);
  return caller == nullptr ? v1::Token::ROLE_UNSPECIFIED : caller->role;
}

void NameClientsBy(std::shared_ptr<const TokenTable> tokens) {
  ProcessTokens().Set(std::move(tokens));
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

const absl::flat_hash_map<absl::string_view, Token::Role>& MethodRoles() {
  static const auto* const roles = new absl::flat_hash_map<absl::string_view, Token::Role>{
#define EMBERD_RPC(service, method, role) {"/emberd.v1." #service "Service/" #method, Token::role},
      EMBERD_PUBLIC_RPCS(EMBERD_RPC)
#undef EMBERD_RPC
  };
  return *roles;
}

bool IsOpen(absl::string_view method) {
  return absl::StartsWith(method, "/grpc.health.v1.Health/") ||
         absl::StartsWith(method, "/grpc.reflection.");
}

v1::Token::Role LeastRole(absl::string_view method) {
  if (absl::StartsWith(method, kInternal)) return Token::CLUSTER;
  const auto found = MethodRoles().find(method);
  return found == MethodRoles().end() ? Token::ADMIN : found->second;
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

absl::Status TokenCheck::CheckCall(const CallHeaders& call) const {
  if (IsOpen(call.method)) return absl::OkStatus();
  const std::shared_ptr<const TokenTable> tokens = tokens_.Get();
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
  refusals_.Add({.method = name, .reason = reason, .client = client, .agent = call.agent});
  for (size_t i = 0; metrics_ != nullptr && i < ops::kRpcCount; ++i) {
    const auto rpc = static_cast<ops::Rpc>(i);
    if (name == ops::RpcName(rpc)) metrics_->ObserveRpc(rpc, code, 0);
  }
  return absl::Status(code, absl::StrCat(name, ": ", reason));
}

absl::Status TokenCheck::CheckPage(absl::string_view path, absl::string_view authorization,
                                   absl::string_view peer) const {
  const std::shared_ptr<const TokenTable> tokens = tokens_.Get();
  absl::string_view token = BearerToken(authorization);
  const std::string password = token.empty() ? BasicPassword(authorization) : "";
  if (token.empty()) token = password;
  const Caller* const caller = token.empty() ? nullptr : tokens->Find(token);
  if (caller == nullptr) {
    const absl::string_view reason =
        token.empty() ? "no token; send it as a bearer token, or as the password of any user"
                      : kUnknownToken;
    refusals_.Add({.method = path, .reason = reason, .client = peer, .agent = ""});
    return absl::UnauthenticatedError(reason);
  }
  if (Suffices(caller->role, v1::Token::READER)) return absl::OkStatus();
  const std::string reason = LowRole(*caller, v1::Token::READER);
  refusals_.Add({.method = path, .reason = reason, .client = caller->name, .agent = ""});
  return absl::PermissionDeniedError(reason);
}

std::shared_ptr<grpc::AuthMetadataProcessor> MakeCallGuard(
    std::shared_ptr<const TokenCheck> check) {
  return std::make_shared<CallGuard>(std::move(check));
}

// What the token files hold.
struct Security::Tokens {
  static absl::StatusOr<Tokens> Load(const v1::SecurityConfig& config) {
    const absl::StatusOr<v1::TokenFile> file = config::LoadTokenFile(config.tokens_file());
    RETURN_IF_ERROR(Annotate(file.status(), "security.tokens_file"));
    Tokens tokens{.text = file->SerializeAsString(),
                  .table = std::make_shared<const TokenTable>(*file),
                  .own = {}};
    ASSIGN_OR_RETURN(tokens.own, LoadClusterToken(config, *tokens.table));
    return tokens;
  }

  std::string text;  // differs where the file says something else
  std::shared_ptr<const TokenTable> table;
  std::string own;
};

absl::StatusOr<std::shared_ptr<Security>> Security::Create(const v1::SecurityConfig& config,
                                                           ops::Metrics* metrics) {
  std::shared_ptr<Security> security(new Security(config));
  if (config.has_tls()) {
    ASSIGN_OR_RETURN(security->tls_, MakeTlsTransport(config.tls()));
  }
  if (config.tokens_file().empty()) return security;
  ASSIGN_OR_RETURN(Tokens tokens, Tokens::Load(config));
  security->cluster_token_ = std::make_shared<Replaceable<std::string>>(std::move(tokens.own));
  security->tokens_ = std::make_shared<TokenCheck>(tokens.table, metrics);
  NameClientsBy(std::move(tokens.table));
  absl::MutexLock lock(&security->mutex_);
  security->token_file_ = std::move(tokens.text);
  return security;
}

std::vector<std::string> Security::Files() const {
  std::vector<std::string> files;
  for (const std::string& file :
       {config_.tls().certificate_file(), config_.tls().key_file(), config_.tls().ca_file(),
        config_.tokens_file(), config_.cluster_token_file()}) {
    if (!file.empty()) files.push_back(file);
  }
  return files;
}

absl::StatusOr<bool> Security::Reload() {
  absl::MutexLock lock(&mutex_);
  // One that is broken does not keep the other from being read.
  const absl::StatusOr<bool> certificates = tls_ == nullptr ? false : tls_->Reload();
  const absl::StatusOr<bool> tokens = ReloadTokens();
  if (!certificates.ok()) return certificates.status();
  if (!tokens.ok()) return tokens.status();
  return *certificates || *tokens;
}

absl::StatusOr<bool> Security::ReloadTokens() {
  if (tokens_ == nullptr) return false;
  ASSIGN_OR_RETURN(Tokens tokens, Tokens::Load(config_));
  if (tokens.text == token_file_ && tokens.own == cluster_token_->Get()) return false;
  token_file_ = std::move(tokens.text);
  tokens_->SetTokens(tokens.table);
  NameClientsBy(std::move(tokens.table));
  cluster_token_->Set(std::move(tokens.own));
  return true;
}

std::shared_ptr<grpc::ServerCredentials> Security::ServerCredentials() const {
  auto guard = tokens_ == nullptr ? nullptr : MakeCallGuard(tokens_);
  if (tls_ != nullptr) return tls_->ServerCredentials(std::move(guard));
  if (guard == nullptr) return grpc::InsecureServerCredentials();
  // Insecure credentials take no guard. These speak plain text too, with any client that does, but
  // over the loopback interface alone.
  auto credentials = grpc::experimental::LocalServerCredentials(LOCAL_TCP);
  credentials->SetAuthMetadataProcessor(std::move(guard));
  return credentials;
}

std::shared_ptr<grpc::Channel> Security::Connect(const std::string& address,
                                                 const grpc::ChannelArguments& arguments,
                                                 Metadata metadata) const {
  const std::shared_ptr<grpc::ChannelCredentials> credentials =
      tls_ == nullptr ? grpc::InsecureChannelCredentials() : tls_->ChannelCredentials();
  std::function<std::string()> token;
  if (cluster_token_ != nullptr) token = [own = cluster_token_] { return own->Get(); };
  if (metadata.empty() && !token) {
    return grpc::CreateCustomChannel(address, credentials, arguments);
  }
  std::vector<std::unique_ptr<ClientInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(
      std::make_unique<MetadataSenderFactory>(std::move(metadata), std::move(token)));
  return grpc::experimental::CreateCustomChannelWithInterceptors(address, credentials, arguments,
                                                                 std::move(interceptors));
}

absl::Status Security::CheckCall(const CallHeaders& call) const {
  return tokens_ == nullptr ? absl::OkStatus() : tokens_->CheckCall(call);
}

std::string Security::OwnAuthorization() const {
  return cluster_token_ == nullptr ? "" : absl::StrCat("Bearer ", cluster_token_->Get());
}

void Security::Protect(ops::HttpOptions* options) const {
  if (tls_ != nullptr) options->tls = tls_->Http();
  if (tokens_ == nullptr) return;
  options->admit = [tokens = tokens_](const ops::HttpRequest& request) {
    return tokens->CheckPage(request.path, request.authorization, request.peer);
  };
}

CredentialsWatch::CredentialsWatch(Security* security, std::function<void()> changed,
                                   absl::Duration every, absl::Duration at_least)
    : security_(security),
      changed_(std::move(changed)),
      at_least_(at_least),
      files_(security->Files()),
      seen_(config::FileMarks(files_)),
      looks_(files_.empty() ? absl::InfiniteDuration() : every, [this] { Look(); }) {}

void CredentialsWatch::ReloadSoon() {
  asked_ = true;
  looks_.RunSoon();
}

void CredentialsWatch::Look() {
  const bool asked = asked_.exchange(false);
  if (IsTime(asked)) Reload(asked);
}

bool CredentialsWatch::IsTime(bool asked) {
  std::string marks = config::FileMarks(files_);
  const bool calm = marks == seen_;
  seen_ = std::move(marks);
  if (!asked && (!calm || (seen_ == read_ && SteadyNow() < due_))) return false;
  read_ = seen_;
  due_ = SteadyNow() + at_least_;
  return true;
}

void CredentialsWatch::Reload(bool asked) {
  const absl::StatusOr<bool> changed = security_->Reload();
  if (!changed.ok()) {
    ops::Log(ops::LogLevel::kError,
             "certificates or tokens cannot be read: the old ones stay in use",
             {{"error", changed.status().message()}});
  } else if (*changed) {
    ops::Log(ops::LogLevel::kInfo, "certificates and tokens were read again");
  } else if (asked || broken_) {
    ops::Log(ops::LogLevel::kInfo, files_.empty()
                                       ? "the description names no certificate and no token to read"
                                       : "certificates and tokens have not changed");
  }
  broken_ = !changed.ok();
  if (broken_) due_ = SteadyNow() + at_least_ / 1440;  // a minute of a day
  if (changed_) changed_();
}

}  // namespace emberd::security
