#include "server/security/security.h"

#include <utility>
#include <vector>

#include <grpcpp/create_channel.h>
#include <grpcpp/support/client_interceptor.h>

#include "absl/strings/str_cat.h"
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
  explicit MetadataSender(const Security::Metadata& metadata) : metadata_(metadata) {}

  void Intercept(InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->insert(metadata_.begin(), metadata_.end());
    }
    methods->Proceed();
  }

 private:
  const Security::Metadata& metadata_;
};

class MetadataSenderFactory final : public ClientInterceptorFactoryInterface {
 public:
  explicit MetadataSenderFactory(Security::Metadata metadata) : metadata_(std::move(metadata)) {}
  Interceptor* CreateClientInterceptor(ClientRpcInfo*) override {
    return new MetadataSender(metadata_);
  }

 private:
  const Security::Metadata metadata_;
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

absl::StatusOr<std::shared_ptr<const Security>> Security::Create(const v1::SecurityConfig& config,
                                                                 ops::Metrics* metrics) {
  std::shared_ptr<Security> security(new Security());
  if (config.has_tls()) {
    absl::StatusOr<std::unique_ptr<TransportSecurity>> tls = MakeTlsTransport(config.tls());
    if (!tls.ok()) return tls.status();
    security->transport_ = *std::move(tls);
  } else {
    security->transport_ = MakePlainTransport();
  }
  if (config.tokens_file().empty()) return security;
  const absl::StatusOr<v1::TokenFile> file = config::LoadTokenFile(config.tokens_file());
  if (!file.ok()) {
    return absl::Status(file.status().code(),
                        absl::StrCat("security.tokens_file: ", file.status().message()));
  }
  auto table = std::make_shared<const TokenTable>(*file);
  absl::StatusOr<std::string> token = LoadClusterToken(config, *table);
  if (!token.ok()) return token.status();
  security->cluster_token_ = *std::move(token);
  security->tokens_ = std::make_shared<const TokenCheck>(table, metrics);
  NameClientsBy(std::move(table));
  return security;
}

std::shared_ptr<grpc::ServerCredentials> Security::ServerCredentials() const {
  return transport_->ServerCredentials(tokens_ == nullptr ? nullptr : MakeCallGuard(tokens_));
}

std::shared_ptr<grpc::Channel> Security::Connect(const std::string& address,
                                                 const grpc::ChannelArguments& arguments,
                                                 Metadata metadata) const {
  const std::shared_ptr<grpc::ChannelCredentials> credentials = transport_->ChannelCredentials();
  if (!cluster_token_.empty()) {
    metadata.emplace_back("authorization", absl::StrCat("Bearer ", cluster_token_));
  }
  if (metadata.empty()) return grpc::CreateCustomChannel(address, credentials, arguments);
  std::vector<std::unique_ptr<ClientInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(std::make_unique<MetadataSenderFactory>(std::move(metadata)));
  return grpc::experimental::CreateCustomChannelWithInterceptors(address, credentials, arguments,
                                                                 std::move(interceptors));
}

void Security::Protect(ops::HttpOptions* options) const {
  options->tls = transport_->Http();
  if (tokens_ == nullptr) return;
  options->admit = [tokens = tokens_](const ops::HttpRequest& request) {
    return tokens->CheckPage(request.path, request.authorization, request.peer);
  };
}

}  // namespace emberd::security
