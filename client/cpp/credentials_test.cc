#include "config/credentials.h"

#include <filesystem>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/testing/await.h"
#include "base/testing/held_port.h"
#include "client/cpp/coordinator.h"
#include "client/cpp/transport.h"
#include "config/testing/test_ca.h"
#include "gmock/gmock.h"
#include "grpcpp/server_builder.h"
#include "gtest/gtest.h"

namespace emberd::client {
namespace credentials_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kToken[] = "0123456789abcdef";

// Answers GetStatus with the caller's "authorization" as its address.
class StatusService final : public v1::AdminService::Service {
 public:
  explicit StatusService(const std::shared_ptr<grpc::ServerCredentials>& credentials,
                         const std::string& address = "127.0.0.1:0") {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(address, credentials, &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  const std::string& address() const { return address_; }

  grpc::Status GetStatus(grpc::ServerContext* context, const v1::GetStatusRequest*,
                         v1::GetStatusResponse* response) override {
    const auto found = context->client_metadata().find("authorization");
    if (found != context->client_metadata().end()) {
      response->add_shards()->set_address({found->second.data(), found->second.size()});
    }
    return grpc::Status::OK;
  }

 private:
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

class CredentialsTest : public ::testing::Test {
 protected:
  std::shared_ptr<grpc::ServerCredentials> ServerTls(const std::string& name, bool mutual) const {
    auto files = config::LoadPemFiles({.certificate_file = ca_.Path(name + ".pem"),
                                       .key_file = ca_.Path(name + "-key.pem"),
                                       .ca_file = ca_.Path("ca.pem")});
    EXPECT_TRUE(files.ok()) << files.status();
    grpc::SslServerCredentialsOptions options(
        mutual ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
               : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
    options.pem_root_certs = files->ca;
    options.pem_key_cert_pairs.push_back({files->key, files->certificate});
    return grpc::SslServerCredentials(options);
  }
  TlsOptions ClientTls(const std::string& name = "") const {
    TlsOptions tls{.ca_file = ca_.Path("ca.pem")};
    if (!name.empty()) {
      tls.certificate_file = ca_.Path(name + ".pem");
      tls.key_file = ca_.Path(name + "-key.pem");
    }
    return tls;
  }
  static ClientOptions Options(const StatusService& service) {
    ClientOptions options;
    options.addresses = {service.address()};
    options.connect_timeout = absl::Seconds(30);
    return options;
  }
  // What the server gets as "authorization".
  static absl::StatusOr<std::string> Authorization(const ClientOptions& options) {
    auto transport = Transport::Connect(options);
    if (!transport.ok()) return transport.status();
    return Authorization(**transport);
  }
  static absl::StatusOr<std::string> Authorization(Transport& transport) {
    const auto response = transport.Call<v1::GetStatusResponse>(v1::GetStatusRequest());
    if (!response.ok()) return response.status();
    return response->shards_size() == 0 ? "" : response->shards(0).address();
  }
  // Tried for a second, and again where the reason is not there in time, as on a busy machine.
  static std::string ConnectError(ClientOptions options, const std::string& reason) {
    options.connect_timeout = absl::Seconds(1);
    const absl::Status status =
        Await([&] { return Transport::Connect(options).status(); },
              [&](const absl::Status& seen) { return absl::StrContains(seen.message(), reason); });
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    return std::string(status.message());
  }

  const config::TestCa ca_;
};

TEST_F(CredentialsTest, SendsTheTokenWithEachCall) {
  const StatusService service(grpc::InsecureServerCredentials());
  ClientOptions options = Options(service);
  EXPECT_EQ(*Authorization(options), "");
  options.token = kToken;
  EXPECT_EQ(*Authorization(options), absl::StrCat("Bearer ", kToken));
  options.token.clear();
  options.token_file = ca_.Write("token", absl::StrCat(kToken, "\n"));
  EXPECT_EQ(*Authorization(options), absl::StrCat("Bearer ", kToken));
}

TEST_F(CredentialsTest, TlsAndMutualTls) {
  const StatusService service(ServerTls("server", false));
  ClientOptions options = Options(service);
  options.tls = ClientTls();
  options.token = kToken;
  EXPECT_EQ(*Authorization(options), absl::StrCat("Bearer ", kToken));
  const StatusService closed(ServerTls("server", true));
  options = Options(closed);
  options.tls = ClientTls("client");
  EXPECT_EQ(*Authorization(options), "");
}

// Replaces a file as a whole.
void Renew(const std::string& to, const std::string& from) {
  std::filesystem::copy_file(from, to + ".new");
  std::filesystem::rename(to + ".new", to);
}

TEST_F(CredentialsTest, AClientFollowsItsFiles) {
  ClientOptions options;
  options.connect_timeout = absl::Seconds(30);
  options.tls = ClientTls("client");
  options.token_file = ca_.Write("token", absl::StrCat(kToken, "\n"));
  const auto port = *HeldPort::Take();
  auto before = std::make_unique<StatusService>(ServerTls("server", true), port->address());
  options.addresses = {before->address()};
  auto transport = Transport::Connect(options);
  ASSERT_TRUE(transport.ok()) << transport.status();
  const auto said = [&] { return Authorization(**transport).value_or("nothing"); };
  EXPECT_EQ(said(), absl::StrCat("Bearer ", kToken));

  Renew(ca_.Path("token"), ca_.Write("token-2", "another-token-of-it\n"));
  EXPECT_TRUE(Eventually([&] { return said() == "Bearer another-token-of-it"; }));
  ca_.Write("token", "damaged");  // the one before stays
  EXPECT_EQ(said(), "Bearer another-token-of-it");

  // Another authority signs for both sides.
  const config::TestCa other;
  before.reset();
  for (const char* file :
       {"ca.pem", "server.pem", "server-key.pem", "client.pem", "client-key.pem"}) {
    Renew(ca_.Path(file), other.Path(file));
  }
  Renew(ca_.Path("token"), ca_.Write("token-3", "the-third-token-of-it\n"));
  const StatusService after(ServerTls("server", true), port->address());
  EXPECT_TRUE(Eventually([&] { return said() == "Bearer the-third-token-of-it"; }));
}

// Without the reason, nobody finds out that it is the certificate and not the network.
TEST_F(CredentialsTest, ConnectSaysWhyACertificateWasNotTaken) {
  const config::TestCa other;
  const StatusService service(ServerTls("server", false));
  ClientOptions options = Options(service);
  options.tls = TlsOptions{.ca_file = other.Path("ca.pem")};
  EXPECT_THAT(ConnectError(options, "certificate verify failed"),
              AllOf(HasSubstr(service.address()), HasSubstr("certificate verify failed")));
  options.tls = ClientTls();
  options.tls->server_name = "example.com";
  EXPECT_THAT(ConnectError(options, "example.com"), HasSubstr("example.com"));
  const StatusService plain(grpc::InsecureServerCredentials());
  options = Options(plain);
  options.tls = ClientTls();
  EXPECT_THAT(ConnectError(options, "andshake failed"), HasSubstr("andshake failed"));
}

TEST_F(CredentialsTest, WrongFilesAreNamedWithTheirFields) {
  const StatusService service(grpc::InsecureServerCredentials());
  const auto error = [](const ClientOptions& options) {
    const absl::Status status = Transport::Connect(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  ClientOptions options = Options(service);
  options.tls = TlsOptions{.ca_file = "/nothing"};
  EXPECT_THAT(error(options), StartsWith("ClientOptions.tls.ca_file: /nothing: "));
  options.tls = ClientTls("client");
  options.tls->key_file.clear();
  EXPECT_THAT(error(options), StartsWith("ClientOptions.tls.key_file: empty"));
  options.tls.reset();
  options.token_file = "/nothing";
  EXPECT_THAT(error(options), StartsWith("ClientOptions.token_file: /nothing: "));
  options.token_file.clear();
  options.token = "s3cret";
  EXPECT_THAT(error(options), AllOf(StartsWith("ClientOptions.token: "), Not(HasSubstr("s3cret"))));
}

TEST_F(CredentialsTest, ATokenDoesNotLeaveThisMachineInPlainText) {
  ClientOptions options;
  options.addresses = {"127.0.0.1:1", "trainers.example.com:1"};
  options.token = kToken;
  const absl::Status status = LoadCredentials(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("trainers.example.com:1"));
  options.tls = ClientTls();
  EXPECT_TRUE(LoadCredentials(options).ok());
}

}  // namespace credentials_test
}  // namespace emberd::client
