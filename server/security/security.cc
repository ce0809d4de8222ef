#include "server/security/security.h"

#include <functional>
#include <utility>
#include <vector>

#include <grpcpp/channel.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/support/channel_arguments.h>
#include <grpcpp/support/client_interceptor.h>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "config/config.h"
#include "config/credentials.h"
#include "server/security/callers.h"

namespace emberd::security {
namespace {

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

class Security::OwnToken {
 public:
  explicit OwnToken(std::string token) : token_(std::move(token)) {}
  std::string Get() const {
    MutexLock lock(&mutex_);
    return token_;
  }
  void Set(std::string token) {
    MutexLock lock(&mutex_);
    token_ = std::move(token);
  }

 private:
  mutable Mutex mutex_;
  std::string token_ ABSL_GUARDED_BY(mutex_);
};

// What the token files hold.
struct Security::Tokens {
  static absl::StatusOr<Tokens> Load(const v1::SecurityConfig& config) {
    const absl::StatusOr<v1::TokenFile> file = config::LoadTokenFile(config.tokens_file());
    if (!file.ok()) {
      return absl::Status(file.status().code(),
                          absl::StrCat("security.tokens_file: ", file.status().message()));
    }
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
    ASSIGN_OR_RETURN(security->transport_, MakeTlsTransport(config.tls()));
  } else {
    security->transport_ = MakePlainTransport();
  }
  if (config.tokens_file().empty()) return security;
  ASSIGN_OR_RETURN(Tokens tokens, Tokens::Load(config));
  security->cluster_token_ = std::make_shared<OwnToken>(std::move(tokens.own));
  security->tokens_ = std::make_shared<TokenCheck>(tokens.table, metrics);
  NameClientsBy(std::move(tokens.table));
  MutexLock lock(&security->mutex_);
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
  MutexLock lock(&mutex_);
  // One that is broken does not keep the other from being read.
  const absl::StatusOr<bool> certificates = transport_->Reload();
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
  return transport_->ServerCredentials(tokens_ == nullptr ? nullptr : MakeCallGuard(tokens_));
}

std::shared_ptr<grpc::Channel> Security::Connect(const std::string& address,
                                                 const grpc::ChannelArguments& arguments,
                                                 Metadata metadata) const {
  const std::shared_ptr<grpc::ChannelCredentials> credentials = transport_->ChannelCredentials();
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
  options->tls = transport_->Http();
  if (tokens_ == nullptr) return;
  options->admit = [tokens = tokens_](const ops::HttpRequest& request) {
    return tokens->CheckPage(request.path, request.authorization, request.peer);
  };
}

}  // namespace emberd::security
