#include "server/security/security.h"

#include <atomic>
#include <memory>
#include <string>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/file_descriptor.h"
#include "base/testing/await.h"
#include "config/testing/test_ca.h"
#include "google/protobuf/text_format.h"
#include "server/security/testing/echo_server.h"
#include "server/security/testing/log_file.h"
#include "server/security/testing/tokens.h"

namespace emberd::security {
namespace security_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kLookup[] = "/emberd.v1.EmbeddingService/Lookup";
constexpr char kGather[] = "/emberd.internal.v1.ShardService/Gather";

class SecurityTest : public testing::Test {
 protected:
  ~SecurityTest() override { NameClientsBy(nullptr); }

  v1::SecurityConfig Tls(const std::string& name, bool mutual) const {
    v1::SecurityConfig config;
    config.mutable_tls()->set_certificate_file(ca_.Path(name + ".pem"));
    config.mutable_tls()->set_key_file(ca_.Path(name + "-key.pem"));
    config.mutable_tls()->set_ca_file(ca_.Path("ca.pem"));
    config.mutable_tls()->set_require_client_certificate(mutual);
    return config;
  }
  // Adds TestTokens, and shows the one of `role` to other processes.
  v1::SecurityConfig WithTokens(v1::SecurityConfig config, v1::Token::Role role) const {
    std::string text;
    google::protobuf::TextFormat::PrintToString(TestTokens(), &text);
    config.set_tokens_file(ca_.Write("tokens.textproto", text));
    config.set_cluster_token_file(ca_.Write("cluster.token", TokenOf(role) + "\n"));
    return config;
  }
  static std::shared_ptr<const Security> Make(const v1::SecurityConfig& config) {
    auto security = Security::Create(config);
    EXPECT_TRUE(security.ok()) << security.status();
    return security.ok() ? *std::move(security) : nullptr;
  }
  // How a call between two processes of the cluster ends.
  static grpc::Status CallBetween(const v1::SecurityConfig& server_config,
                                  const v1::SecurityConfig& client_config,
                                  const std::string& method) {
    const EchoServer server(Make(server_config)->ServerCredentials());
    return CallMethod(Make(client_config)->Connect(server.address(), {}), method);
  }
  static std::string Error(const v1::SecurityConfig& config) {
    const absl::Status status = Security::Create(config).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  }

  const config::TestCa ca_;
};

TEST_F(SecurityTest, ProcessesOfAClusterUnderstandEachOther) {
  for (const v1::SecurityConfig& config :
       {v1::SecurityConfig(), Tls("server", false), Tls("server", true)}) {
    EXPECT_EQ(CallBetween(config, config, kGather).error_code(), grpc::StatusCode::ABORTED);
    const v1::SecurityConfig tokens = WithTokens(config, v1::Token::CLUSTER);
    const grpc::Status status = CallBetween(tokens, tokens, kGather);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
    EXPECT_EQ(status.error_message(), "cluster");
  }
}

TEST_F(SecurityTest, TheClustersTokenOpensNothingElse) {
  const v1::SecurityConfig config = WithTokens(Tls("server", true), v1::Token::CLUSTER);
  EXPECT_EQ(CallBetween(config, config, kLookup).error_code(), grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(SecurityTest, AProcessWithoutTheClustersTokenIsRefused) {
  const v1::SecurityConfig config = WithTokens(Tls("server", true), v1::Token::CLUSTER);
  EXPECT_EQ(CallBetween(config, Tls("server", true), kGather).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(SecurityTest, StrangersDoNotConnect) {
  const config::TestCa other;
  v1::SecurityConfig stranger = Tls("server", true);
  stranger.mutable_tls()->set_certificate_file(other.Path("server.pem"));
  stranger.mutable_tls()->set_key_file(other.Path("server-key.pem"));
  v1::SecurityConfig distrustful = Tls("server", true);
  distrustful.mutable_tls()->set_ca_file(other.Path("ca.pem"));
  const v1::SecurityConfig good = Tls("server", true);
  for (const auto& [server, client] :
       {std::pair(good, v1::SecurityConfig()), std::pair(v1::SecurityConfig(), good),
        std::pair(good, stranger), std::pair(stranger, good), std::pair(good, distrustful),
        std::pair(good, Tls("expired", true)), std::pair(Tls("expired", true), good)}) {
    EXPECT_EQ(CallBetween(server, client, kGather).error_code(), grpc::StatusCode::UNAVAILABLE)
        << server.ShortDebugString() << " and " << client.ShortDebugString();
  }
}

TEST_F(SecurityTest, ACertificateCountsForItsNamesAlone) {
  const config::TestCa elsewhere("example.com 127.0.0.2");
  v1::SecurityConfig config;
  config.mutable_tls()->set_certificate_file(elsewhere.Path("server.pem"));
  config.mutable_tls()->set_key_file(elsewhere.Path("server-key.pem"));
  config.mutable_tls()->set_ca_file(elsewhere.Path("ca.pem"));
  EXPECT_EQ(CallBetween(config, config, kGather).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(SecurityTest, WrongFilesAreNamedWithTheirFields) {
  v1::SecurityConfig config = Tls("server", false);
  config.mutable_tls()->set_key_file(ca_.Path("client-key.pem"));
  EXPECT_THAT(Error(config),
              AllOf(StartsWith("security.tls.key_file: "), HasSubstr(ca_.Path("client-key.pem"))));
  config = WithTokens({}, v1::Token::ADMIN);
  EXPECT_THAT(Error(config),
              AllOf(StartsWith("security.cluster_token_file: "), HasSubstr("has the role ADMIN")));
  ca_.Write("cluster.token", "0123456789abcdef");
  EXPECT_THAT(Error(config), HasSubstr("the token is not in " + ca_.Path("tokens.textproto")));
  ca_.Write("tokens.textproto", "tokens { name: 'a' role: READER }");
  EXPECT_THAT(Error(config), AllOf(StartsWith("security.tokens_file: " + ca_.Path("tokens")),
                                   HasSubstr("tokens[0].sha256: ")));
}

TEST_F(SecurityTest, ACertificateThatHasEndedIsSaidSo) {
  const LogFile log;
  Make(Tls("expired", false));
  EXPECT_THAT(log.Lines(),
              Contains(AllOf(HasSubstr("the certificate has expired"), HasSubstr("days_left=-"))));
}

// What this would catch: nobody is warned of a certificate that was fine when the process started.
TEST_F(SecurityTest, FilesThatStayTheSameAreReadAgainInTheEnd) {
  const auto security = Security::Create(Tls("server", false));
  ASSERT_TRUE(security.ok()) << security.status();
  int reads = 0;
  absl::Notification third;
  const auto read = [&] {
    if (++reads == 3) third.Notify();
  };
  const CredentialsWatch watch(security->get(), read, absl::Milliseconds(1), absl::Milliseconds(2));
  EXPECT_TRUE(third.WaitForNotificationWithTimeout(absl::Minutes(2)));
}

// What this would catch: a token or certificate that is used for another day, because the process
// had no descriptor left in the second in which its file was renewed.
TEST_F(SecurityTest, FilesThatCouldNotBeReadAreReadAgainSoon) {
  const LogFile log;
  const v1::SecurityConfig config = WithTokens({}, v1::Token::CLUSTER);
  const auto security = Security::Create(config);
  ASSERT_TRUE(security.ok()) << security.status();
  const FileDescriptor token(open(config.cluster_token_file().c_str(), O_WRONLY | O_APPEND));
  std::atomic<int> reads = 0;
  const CredentialsWatch watch(
      security->get(), [&] { ++reads; }, absl::Milliseconds(1), absl::Minutes(20));
  ASSERT_TRUE(Eventually([&] { return reads == 1; }));
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  const rlim_t before = limit.rlim_cur;
  limit.rlim_cur = 0;  // what is open stays so
  setrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_EQ(write(token.get(), "\n", 1), 1);  // the same token, in another file
  EXPECT_TRUE(Eventually([&] { return reads > 1; }));
  limit.rlim_cur = before;
  setrlimit(RLIMIT_NOFILE, &limit);
  const auto logged = [&](const char* text) {
    return absl::c_any_of(log.Lines(),
                          [&](const auto& line) { return absl::StrContains(line, text); });
  };
  EXPECT_TRUE(logged("tokens cannot be read"));
  EXPECT_TRUE(Eventually([&] { return logged("certificates and tokens have not changed"); }));
}

TEST_F(SecurityTest, PagesGetTheSameProtection) {
  ops::HttpOptions plain;
  Make({})->Protect(&plain);
  EXPECT_FALSE(plain.tls.has_value());
  EXPECT_FALSE(plain.admit);
  ops::HttpOptions closed;
  Make(WithTokens(Tls("server", true), v1::Token::CLUSTER))->Protect(&closed);
  ASSERT_TRUE(closed.tls.has_value());
  EXPECT_NE(closed.tls->client_ca, "");
  ASSERT_TRUE(closed.admit);
  const ops::HttpRequest good = {"/metrics", "10.0.0.1", Bearer(v1::Token::READER)};
  EXPECT_TRUE(closed.admit(good).ok());
  EXPECT_EQ(closed.admit({"/metrics", "10.0.0.1", ""}).code(), absl::StatusCode::kUnauthenticated);
}

}  // namespace security_test
}  // namespace emberd::security
