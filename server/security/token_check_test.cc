#include <memory>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/checkpoint_service.pb.h"
#include "emberd/v1/embedding_service.pb.h"
#include "emberd/v1/program_service.pb.h"
#include "server/ops/http.h"
#include "server/security/security.h"
#include "server/security/testing/echo_server.h"
#include "server/security/testing/log_file.h"
#include "server/security/testing/tokens.h"

namespace emberd::security {
namespace token_check_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using v1::Token;

// "/package.Service/Method" of everything that a file declares.
void AddMethods(const google::protobuf::FileDescriptor& file, std::set<std::string>* methods) {
  for (int s = 0; s < file.service_count(); ++s) {
    for (int m = 0; m < file.service(s)->method_count(); ++m) {
      methods->insert(
          absl::StrCat("/", file.service(s)->full_name(), "/", file.service(s)->method(m)->name()));
    }
  }
}

// Catches a method that is added and then given to nobody, or to everybody.
TEST(MethodRolesTest, EveryPublicMethodStandsInTheTable) {
  std::set<std::string> declared;
  AddMethods(*v1::LookupRequest::descriptor()->file(), &declared);
  AddMethods(*v1::GetStatusRequest::descriptor()->file(), &declared);
  AddMethods(*v1::SaveCheckpointRequest::descriptor()->file(), &declared);
  AddMethods(*v1::CompileRequest::descriptor()->file(), &declared);
  ASSERT_GT(declared.size(), 30u);
  std::set<std::string> listed;
  for (const auto& [method, role] : MethodRoles()) {
    listed.emplace(method);
    EXPECT_NE(role, Token::ROLE_UNSPECIFIED) << method;
    EXPECT_EQ(LeastRole(method), role) << method;
    EXPECT_FALSE(IsOpen(method)) << method;
  }
  EXPECT_EQ(listed, declared);
}

TEST(MethodRolesTest, InternalServicesAreForTheClusterAlone) {
  std::set<std::string> internal;
  AddMethods(*internal::v1::GatherHeader::descriptor()->file(), &internal);
  ASSERT_GT(internal.size(), 25u);
  for (const std::string& method : internal) {
    EXPECT_EQ(LeastRole(method), Token::CLUSTER) << method;
    EXPECT_TRUE(MayCall(Token::CLUSTER, method)) << method;
    EXPECT_FALSE(MayCall(Token::ADMIN, method)) << method;
  }
  for (const auto& [method, role] : MethodRoles()) {
    EXPECT_NE(role, Token::CLUSTER) << method;
  }
}

TEST(MethodRolesTest, WhatChangesRowsIsNotForReaders) {
  EXPECT_EQ(LeastRole("/emberd.v1.EmbeddingService/ApplyGradients"), Token::TRAINER);
  EXPECT_EQ(LeastRole("/emberd.v1.EmbeddingService/AssignRows"), Token::LOADER);
  EXPECT_EQ(LeastRole("/emberd.v1.AdminService/Drain"), Token::ADMIN);
  EXPECT_EQ(LeastRole("/emberd.v1.AdminService/ChangeMemory"), Token::ADMIN);
  EXPECT_EQ(LeastRole("/emberd.v1.EmbeddingService/Lookup"), Token::READER);
}

TEST(MethodRolesTest, CheckpointsAreMadeByTrainersAndUsedByAdministrators) {
  const auto role = [](const char* method) {
    return LeastRole(absl::StrCat("/emberd.v1.CheckpointService/", method));
  };
  EXPECT_EQ(role("SaveCheckpoint"), Token::TRAINER);
  for (const char* method : {"ListCheckpoints", "GetCheckpoint", "VerifyCheckpoint",
                             "DiffCheckpoints", "ExportCheckpoint"}) {
    EXPECT_EQ(role(method), Token::READER) << method;
  }
  for (const char* method :
       {"RestoreCheckpoint", "ServeCheckpoint", "MergeCheckpoint", "DeleteCheckpoint"}) {
    EXPECT_EQ(role(method), Token::ADMIN) << method;
  }
}

TEST(MethodRolesTest, ProgramsAreForTrainers) {
  for (const char* method :
       {"Compile", "Release", "PrepareBatch", "Execute", "ExecuteChained", "ReadHandle"}) {
    EXPECT_EQ(LeastRole(absl::StrCat("/emberd.v1.ProgramService/", method)), Token::TRAINER);
  }
}

TEST(MethodRolesTest, UnknownMethodsAreForAdministrators) {
  for (const char* method : {"", "/", "/emberd.v1.EmbeddingService/Unknown",
                             "/emberd.v1.EmbeddingService/Lookup/", "emberd.v1.X", "/a.B/C"}) {
    EXPECT_EQ(LeastRole(method), Token::ADMIN) << method;
    EXPECT_FALSE(IsOpen(method)) << method;
  }
}

TEST(MethodRolesTest, OnlyHealthAndReflectionAreOpen) {
  EXPECT_TRUE(IsOpen("/grpc.health.v1.Health/Check"));
  EXPECT_TRUE(IsOpen("/grpc.health.v1.Health/Watch"));
  EXPECT_TRUE(IsOpen("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"));
  EXPECT_FALSE(IsOpen("/grpc.health.v1.HealthX/Check"));
  EXPECT_FALSE(IsOpen("/grpc.channelz.v1.Channelz/GetServers"));
}

TEST(MethodRolesTest, RolesRiseAndTheClusterStandsAside) {
  const Token::Role rising[] = {Token::READER, Token::TRAINER, Token::LOADER, Token::ADMIN};
  for (int role = 0; role < 4; ++role) {
    for (int least = 0; least < 4; ++least) {
      EXPECT_EQ(Suffices(rising[role], rising[least]), role >= least);
    }
    EXPECT_FALSE(Suffices(rising[role], Token::CLUSTER));
    EXPECT_FALSE(Suffices(Token::CLUSTER, rising[role]));
  }
  EXPECT_TRUE(Suffices(Token::CLUSTER, Token::CLUSTER));
}

TEST(MethodRolesTest, CoordinatorsMayAskEachOtherForFiguresAlone) {
  for (const auto& [method, role] : MethodRoles()) {
    const bool figures = method == "/emberd.v1.AdminService/GetStats";
    EXPECT_EQ(MayCall(Token::CLUSTER, method), figures || role == Token::CLUSTER) << method;
  }
}

TEST(MethodRolesTest, LoadersDoNotAdminister) {
  EXPECT_TRUE(MayCall(Token::LOADER, "/emberd.v1.EmbeddingService/AssignRows"));
  EXPECT_TRUE(MayCall(Token::LOADER, "/emberd.v1.EmbeddingService/Train"));
  EXPECT_FALSE(MayCall(Token::TRAINER, "/emberd.v1.EmbeddingService/AssignRows"));
  EXPECT_FALSE(MayCall(Token::LOADER, "/emberd.v1.AdminService/DropModel"));
  EXPECT_FALSE(MayCall(Token::LOADER, "/emberd.v1.CheckpointService/RestoreCheckpoint"));
}

TEST(RefusalLogTest, TheSameRefusalIsOneLine) {
  const LogFile file;
  RefusalLog log;
  for (int i = 0; i < 100; ++i) {
    log.Add({.method = "A/B", .reason = "no token", .client = "", .agent = "curl"});
    log.Add({.method = "A/C", .reason = "no token", .client = "alice", .agent = ""});
  }
  EXPECT_THAT(file.Lines(),
              ElementsAre(AllOf(HasSubstr(" W test refused method=A/B reason=\"no token\""),
                                HasSubstr("agent=curl")),
                          AllOf(HasSubstr("method=A/C"), HasSubstr("client=alice"))));
}

// Whoever calls with ever new names fills neither memory nor disk.
TEST(RefusalLogTest, EndlesslyManyKindsAreBounded) {
  const LogFile file;
  RefusalLog log;
  for (int i = 0; i < 3000; ++i) {
    const std::string agent = absl::StrCat("agent-", i);
    log.Add({.method = "A/B", .reason = "no token", .client = "", .agent = agent});
  }
  EXPECT_THAT(file.Lines(), SizeIs(ops::KeyedLog::kMaxKeys + 1));
}

TEST(RefusalLogTest, WhatTheCallerChoseIsCutAndEscaped) {
  const LogFile file;
  RefusalLog log;
  const std::string agent = "a\nb" + std::string(100'000, 'x');
  log.Add({.method = agent, .reason = "no token", .client = "", .agent = agent});
  ASSERT_THAT(file.Lines(), SizeIs(1));
  EXPECT_LT(file.Lines()[0].size(), 500u);
}

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
  for (const auto& [method, role] : MethodRoles()) {
    for (const v1::Token::Role caller : kAllRoles) {
      const absl::Status status = Call(method, {Bearer(caller)});
      const auto expected =
          MayCall(caller, method) ? absl::StatusCode::kOk : absl::StatusCode::kPermissionDenied;
      EXPECT_EQ(status.code(), expected) << method << " as " << Token::Role_Name(caller);
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
                                          "needed; the token has the role READER"));
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

}  // namespace token_check_test
}  // namespace emberd::security
