#include "server/security/token_check.h"

#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include "absl/strings/escaping.h"
#include "server/ops/http_routes.h"
#include "server/security/method_roles.h"
#include "server/security/testing/echo_server.h"
#include "server/security/testing/log_file.h"
#include "server/security/testing/tokens.h"

namespace emberd::security {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr char kLookupMethod[] = "/emberd.v1.EmbeddingService/Lookup";
constexpr char kApply[] = "/emberd.v1.EmbeddingService/ApplyGradients";

class TokenCheckTest : public testing::Test {
 protected:
  absl::Status Call(absl::string_view method, const std::vector<absl::string_view>& headers) {
    return check_.CheckCall(
        {.method = method, .authorization = headers, .agent = "agent", .certificate = "cn"});
  }

  const LogFile log_;
  const TokenCheck check_{std::make_shared<const TokenTable>(TestTokens())};
};

TEST_F(TokenCheckTest, EveryRoleCallsWhatTheTableGivesIt) {
  for (const MethodRole& entry : MethodRoles()) {
    for (const v1::Token::Role role : kAllRoles) {
      const absl::Status status = Call(entry.method, {Bearer(role)});
      const auto expected =
          Suffices(role, entry.role) ? absl::StatusCode::kOk : absl::StatusCode::kPermissionDenied;
      EXPECT_EQ(status.code(), expected) << entry.method << " as " << RoleName(role);
    }
  }
}

TEST_F(TokenCheckTest, SaysWhatIsNeededAndLogsItOnce) {
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(Call(kLookupMethod, {}),
              absl::UnauthenticatedError("EmbeddingService/Lookup: no token; send "
                                         "\"authorization: Bearer TOKEN\" once"));
    EXPECT_EQ(Call(kLookupMethod, {"Bearer s3cret"}),
              absl::UnauthenticatedError("EmbeddingService/Lookup: the token is unknown"));
    EXPECT_EQ(Call(kApply, {Bearer(v1::Token::READER)}),
              absl::PermissionDeniedError("EmbeddingService/ApplyGradients: the role TRAINER is "
                                          "needed, and the token's is READER"));
  }
  EXPECT_THAT(log_.Lines(),
              ElementsAre(AllOf(HasSubstr("method=EmbeddingService/Lookup"), HasSubstr("no token"),
                                HasSubstr("client=cn agent=agent")),
                          AllOf(HasSubstr("the token is unknown"), Not(HasSubstr("s3cret"))),
                          AllOf(HasSubstr("ApplyGradients"), HasSubstr("client=reader"),
                                Not(HasSubstr(TokenOf(v1::Token::READER))))));
}

TEST_F(TokenCheckTest, OddHeadersAreNoToken) {
  const std::string reader = Bearer(v1::Token::READER);
  const std::string bare = TokenOf(v1::Token::READER);
  for (const std::vector<absl::string_view>& headers :
       {std::vector<absl::string_view>{reader, reader}, {bare}, {"Bearer"}, {""}, {"Basic x"}}) {
    EXPECT_EQ(Call(kLookupMethod, headers).code(), absl::StatusCode::kUnauthenticated);
  }
}

TEST_F(TokenCheckTest, HealthAndReflectionNeedNoToken) {
  EXPECT_TRUE(Call("/grpc.health.v1.Health/Check", {}).ok());
  EXPECT_TRUE(Call("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", {}).ok());
  EXPECT_THAT(log_.Lines(), IsEmpty());
}

TEST_F(TokenCheckTest, PagesAreForReadersAndAbove) {
  const auto page = [this](const std::string& header) {
    return check_.CheckPage("/metrics", header, "10.0.0.1").code();
  };
  for (const v1::Token::Role role : {v1::Token::READER, v1::Token::TRAINER, v1::Token::ADMIN}) {
    EXPECT_EQ(page(Bearer(role)), absl::StatusCode::kOk);
    EXPECT_EQ(page("Basic " + absl::Base64Escape("anybody:" + TokenOf(role))),
              absl::StatusCode::kOk);
  }
  EXPECT_EQ(page(Bearer(v1::Token::CLUSTER)), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(page(""), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(page("Bearer other"), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(page("Basic " + absl::Base64Escape(TokenOf(v1::Token::READER) + ":")),
            absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(log_.Lines(),
              testing::Contains(AllOf(HasSubstr("method=/metrics"), HasSubstr("client=10.0.0.1"))));
}

// An operator sees knocking in the same figures as every other error.
TEST_F(TokenCheckTest, CountsWhatItRefuses) {
  ops::Metrics metrics("shard");
  const TokenCheck check(std::make_shared<const TokenTable>(TestTokens()), &metrics);
  check.CheckCall({.method = kLookupMethod, .authorization = {}}).IgnoreError();
  check.CheckCall({.method = kApply, .authorization = {"Bearer nobody"}}).IgnoreError();
  check.CheckCall({.method = "/unknown/Method", .authorization = {}}).IgnoreError();
  const ops::HttpAnswer page = ops::MetricsRoute(metrics).answer();
  EXPECT_THAT(page.body, HasSubstr("emberd_rpcs_total{code=\"UNAUTHENTICATED\","
                                   "method=\"EmbeddingService/Lookup\"} 1"));
  EXPECT_THAT(page.body, HasSubstr("method=\"EmbeddingService/ApplyGradients\"} 1"));
}

// Through gRPC: over plain text on the loopback interface, where clients know of no guard.
TEST_F(TokenCheckTest, GuardsAPort) {
  const auto credentials = grpc::experimental::LocalServerCredentials(LOCAL_TCP);
  credentials->SetAuthMetadataProcessor(MakeCallGuard(
      std::make_shared<const TokenCheck>(std::make_shared<const TokenTable>(TestTokens()))));
  const EchoServer server(credentials);
  const auto channel = grpc::CreateChannel(server.address(), grpc::InsecureChannelCredentials());
  const auto call = [&](const std::string& method, const std::string& header) {
    return CallMethod(channel, method, {header.empty() ? "" : "authorization", header});
  };
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(call(kLookupMethod, "").error_code(), grpc::StatusCode::UNAUTHENTICATED);
    EXPECT_EQ(call(kLookupMethod, Bearer(v1::Token::READER)).error_code(),
              grpc::StatusCode::ABORTED);
    const grpc::Status refused = call(kApply, Bearer(v1::Token::READER));
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_THAT(refused.error_message(), HasSubstr("TRAINER is needed"));
    EXPECT_EQ(call(kApply, Bearer(v1::Token::TRAINER)).error_code(), grpc::StatusCode::ABORTED);
  }
  EXPECT_EQ(call("/grpc.health.v1.Health/Check", "").error_code(), grpc::StatusCode::ABORTED);
}

}  // namespace
}  // namespace emberd::security
