// Closed doors, with real processes: who may come in trains, on the same bits as ever; whoever may
// not is told why with the right code, and stands in the log of the process once, however often he
// tries. What would go wrong: a port that was forgotten, a role that may do too much, a log that
// anyone can fill, a token in a log.
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/testing/await.h"
#include "base/testing/http_get.h"
#include "base/testing/paths.h"
#include "client/emberctl/emberctl.h"
#include "config/testing/test_ca.h"
#include "emberd/internal/v1/shard_service.grpc.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/security/testing/tokens.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster.h"
#include "tests/testing/group_training.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace security_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using v1::Token;

constexpr int kAttempts = 3;

// The files of a closed cluster, and its description.
class Doors {
 public:
  std::string Path(const std::string& file) const { return ca_.Path(file); }
  const config::TestCa& ca() const { return ca_; }

  std::string Tls(bool mutual, const std::string& name = "server") const {
    return absl::StrCat("tls { certificate_file: '", Path(name + ".pem"), "' key_file: '",
                        Path(name + "-key.pem"), "' ca_file: '", Path("ca.pem"),
                        "' require_client_certificate: ", mutual ? "true" : "false", " }");
  }
  std::string Tokens() const {
    std::string text;
    const v1::TokenFile file = security::TestTokens();
    for (const Token& token : file.tokens()) {
      absl::StrAppend(&text, "tokens { name: '", token.name(),
                      "' role: ", Token::Role_Name(token.role()), " sha256: '", token.sha256(),
                      "' }\n");
    }
    return absl::StrCat("tokens_file: '", ca_.Write("tokens", text), "' cluster_token_file: '",
                        ca_.Write("cluster", security::TokenOf(Token::CLUSTER)), "'");
  }
  client::TlsOptions ClientTls(const std::string& name = "") const {
    client::TlsOptions tls{.ca_file = Path("ca.pem")};
    if (!name.empty()) {
      tls.certificate_file = Path(name + ".pem");
      tls.key_file = Path(name + "-key.pem");
    }
    return tls;
  }

 private:
  const config::TestCa ca_;
};

ClusterOptions Secure(const std::string& security) {
  // A step that takes a second on a busy machine is no warning here.
  return {.config =
              absl::StrCat("security { ", security, " } logging { slow_step_ms: 2147483647 }")};
}

std::unique_ptr<Cluster> Start(const ClusterOptions& options) {
  auto cluster = Cluster::Start(options);
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  return cluster.ok() ? *std::move(cluster) : nullptr;
}

// The number of lines of a log that hold all of `parts`.
int CountLines(const std::string& log, const std::vector<std::string>& parts) {
  int count = 0;
  for (const absl::string_view line : absl::StrSplit(log, '\n')) {
    bool all = true;
    for (const std::string& part : parts) all = all && absl::StrContains(line, part);
    count += all ? 1 : 0;
  }
  return count;
}

// Unary steps, a group of two ranks on streams, and an export of all rows.
std::string TrainAndDigest(const Cluster& cluster) {
  const std::unique_ptr<client::Client> client = cluster.Connect();
  if (client == nullptr) return "";
  auto mixed = client->DeclareModel(MixedModel("mixed"));
  EXPECT_TRUE(mixed.ok()) << mixed.status();
  if (!mixed.ok()) return "";
  for (uint64_t seed = 0; seed < 3; ++seed) {
    const absl::Status status = TrainStep(*client, *mixed, seed, 40);
    EXPECT_TRUE(status.ok()) << status;
  }
  auto grouped = client->DeclareModel(GroupModel("grouped", 0));
  EXPECT_TRUE(grouped.ok()) << grouped.status();
  if (!grouped.ok()) return "";
  const absl::Status status = TrainGroup(cluster, *grouped, {.group = "g", .size = 2}, 1, 3);
  EXPECT_TRUE(status.ok()) << status;
  const auto first = Digest(*client, *mixed);
  const auto second = Digest(*client, *grouped);
  EXPECT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
  return first.ok() && second.ok() ? absl::StrCat(*first, " ", *second) : "";
}

TEST(SecurityTest, TrainsBehindEveryKindOfDoorWithTheSameBits) {
  const Doors doors;
  const std::unique_ptr<Cluster> open = Start({});
  ASSERT_NE(open, nullptr);
  const std::string expected = TrainAndDigest(*open);
  ASSERT_NE(expected, "");
  const std::string token = security::TokenOf(Token::TRAINER);
  ClusterOptions tls = Secure(doors.Tls(false));
  tls.tls = doors.ClientTls();
  ClusterOptions mutual = Secure(doors.Tls(true));
  mutual.tls = doors.ClientTls("client");
  ClusterOptions tokens = Secure(doors.Tokens());
  tokens.token = token;
  ClusterOptions all = Secure(absl::StrCat(doors.Tls(true), doors.Tokens()));
  all.tls = doors.ClientTls("client");
  all.token = token;
  ClusterOptions embedded = all;
  embedded.embedded = true;
  for (const ClusterOptions& options : {tls, mutual, tokens, all, embedded}) {
    const std::unique_ptr<Cluster> cluster = Start(options);
    ASSERT_NE(cluster, nullptr);
    EXPECT_EQ(TrainAndDigest(*cluster), expected) << options.config;
    EXPECT_EQ(CountLines(cluster->CoordinatorLog(), {" W "}), 0) << cluster->CoordinatorLog();
    EXPECT_THAT(cluster->CoordinatorLog(), Not(HasSubstr("the-token-of")));
  }
}

// ---- certificates

// How connecting ends that does not work, or does.
absl::Status TryToConnect(const std::string& address, const std::optional<client::TlsOptions>& tls,
                          absl::Duration timeout = kPatience) {
  client::ClientOptions options;
  options.addresses = {address};
  options.tls = tls;
  options.connect_timeout = timeout;
  return client::Client::Connect(options).status();
}
// Tried for a second, and again where the reason is not there in time, as on a busy machine.
absl::Status FailToConnect(const std::string& address, const std::optional<client::TlsOptions>& tls,
                           const std::string& reason) {
  return Await([&] { return TryToConnect(address, tls, absl::Seconds(1)); },
               [&](const absl::Status& seen) {
                 return seen.ok() || absl::StrContains(seen.message(), reason);
               });
}

TEST(SecurityTest, StrangersAreTurnedAwayAtTheDoor) {
  const Doors doors;
  const Doors others;
  client::TlsOptions distrustful = doors.ClientTls("client");
  distrustful.ca_file = others.Path("ca.pem");
  client::TlsOptions stranger = others.ClientTls("client");
  stranger.ca_file = doors.Path("ca.pem");
  client::TlsOptions elsewhere = doors.ClientTls("client");
  elsewhere.server_name = "example.com";
  const struct {
    const char* what;
    std::optional<client::TlsOptions> tls;
    const char* client_hears;  // part of the message
    const char* log;           // part of the one line in the log; empty: the client hangs up
  } cases[] = {
      {"a client that trusts another authority", distrustful, "certificate verify failed", ""},
      {"a client that expects another host", elsewhere, "example.com", "example.com"},
      {"a client of another authority", stranger, "", "certificate verify failed"},
      {"a client whose certificate has ended", doors.ClientTls("expired"), "",
       "certificate verify failed"},
      {"a client without a certificate", doors.ClientTls(), "",
       "peer did not return a certificate"},
      {"a client in plain text", std::nullopt, "", "wrong version number"},
  };
  for (const auto& bad : cases) {
    // Of its own: several cases leave the same line.
    const std::unique_ptr<Cluster> cluster = Start(Secure(doors.Tls(true)));
    ASSERT_NE(cluster, nullptr);
    for (const std::string& address : {cluster->address(), cluster->shard_address(0)}) {
      const absl::Status status = FailToConnect(address, bad.tls, bad.client_hears);
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << bad.what << ": " << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr(address), HasSubstr(bad.client_hears)))
          << bad.what;
    }
    EXPECT_TRUE(TryToConnect(cluster->address(), doors.ClientTls("client")).ok()) << bad.what;
    if (*bad.log == '\0') continue;
    // The client may hear of it before the server has written it down. A try that was over before a
    // busy server had looked at it leaves no line: then once more.
    const auto said = [&](const std::string& address, const std::string& log) {
      const int lines = CountLines(log, {bad.log});
      if (lines == 0) TryToConnect(address, bad.tls, absl::Seconds(1)).IgnoreError();
      return lines;
    };
    const auto coordinator_said = [&] {
      return said(cluster->address(), cluster->CoordinatorLog());
    };
    const auto shard_said = [&] { return said(cluster->shard_address(0), cluster->ShardLog(0)); };
    const auto any = [](int lines) { return lines > 0; };
    EXPECT_EQ(Await(coordinator_said, any), 1) << bad.what;
    EXPECT_EQ(Await(shard_said, any), 1) << bad.what;
  }
}

TEST(SecurityTest, TlsToAPlainPortSaysSo) {
  const Doors doors;
  const std::unique_ptr<Cluster> cluster = Start({});
  ASSERT_NE(cluster, nullptr);
  const absl::Status status = FailToConnect(cluster->address(), doors.ClientTls(), "andshake");
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("andshake"));
}

// The coordinator is up, but neither trainers nor shards take its certificate.
TEST(SecurityTest, AnExpiredServerIsNotTrusted) {
  const Doors doors;
  const std::unique_ptr<Cluster> cluster = Start(Secure(doors.Tls(false, "expired")));
  ASSERT_NE(cluster, nullptr);
  const absl::Status status =
      FailToConnect(cluster->address(), doors.ClientTls(), "certificate verify failed");
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("certificate verify failed"));
  EXPECT_EQ(CountLines(cluster->CoordinatorLog(), {"the certificate has expired"}), 1);
  EXPECT_EQ(CountLines(cluster->ShardLog(1), {"the certificate has expired"}), 1);
}

// ---- tokens

// How a call ends that carries `token`, or none if it is empty.
using TokenCall = std::function<grpc::Status(const std::string& address, grpc::ClientContext*)>;
grpc::Status WithToken(const std::string& address, const std::string& token,
                       const TokenCall& call) {
  grpc::ClientContext context;
  Prepare(&context);
  if (!token.empty()) context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
  return call(address, &context);
}

grpc::Status Apply(const std::string& address, grpc::ClientContext* context) {
  v1::ApplyGradientsResponse response;
  return Api(address).embedding->ApplyGradients(context, {}, &response);
}
grpc::Status Lookup(const std::string& address, grpc::ClientContext* context) {
  v1::LookupResponse response;
  return Api(address).embedding->Lookup(context, {}, &response);
}
grpc::Status Assign(const std::string& address, grpc::ClientContext* context) {
  v1::AssignRowsResponse response;
  return Api(address).embedding->AssignRows(context, {}, &response);
}
grpc::Status Drain(const std::string& address, grpc::ClientContext* context) {
  v1::DrainResponse response;
  return Api(address).admin->Drain(context, {}, &response);
}
grpc::Status Train(const std::string& address, grpc::ClientContext* context) {
  const Api api(address);
  const auto stream = api.embedding->Train(context);
  v1::TrainResponse response;
  stream->Read(&response);
  return stream->Finish();
}
grpc::Status ShardStatus(const std::string& address, grpc::ClientContext* context) {
  internal::v1::ShardPlace place;  // as a coordinator of this cluster has it
  place.set_shards(2);
  place.set_sparsecores_per_shard(2);
  context->AddMetadata("emberd-shard-place-bin", place.SerializeAsString());
  v1::ShardStatus response;
  return internal::v1::ShardService::NewStub(Api(address).channel)
      ->GetStatus(context, {}, &response);
}

TEST(SecurityTest, RolesDecideWhoCallsWhat) {
  const Doors doors;
  const std::unique_ptr<Cluster> cluster = Start(Secure(doors.Tokens()));
  ASSERT_NE(cluster, nullptr);
  const std::string wrong = "the-token-of-nobody";
  const auto of = [](Token::Role role) { return security::TokenOf(role); };
  const struct {
    const char* method;
    TokenCall call;
    bool shard;
    std::string token;
    grpc::StatusCode code;
    std::string log;  // part of the one line; empty: none
  } cases[] = {
      {"Lookup", Lookup, false, "", grpc::UNAUTHENTICATED, "no token"},
      {"Lookup", Lookup, false, wrong, grpc::UNAUTHENTICATED, "the token is unknown"},
      {"Train", Train, false, "", grpc::UNAUTHENTICATED, "no token"},
      {"Lookup", Lookup, false, of(Token::TRAINER), grpc::NOT_FOUND, ""},
      {"ApplyGradients", Apply, false, of(Token::READER), grpc::PERMISSION_DENIED,
       "the role TRAINER is needed"},
      {"Train", Train, false, of(Token::READER), grpc::PERMISSION_DENIED, "TRAINER is needed"},
      {"AssignRows", Assign, false, of(Token::TRAINER), grpc::PERMISSION_DENIED,
       "the role LOADER is needed"},
      {"Drain", Drain, false, of(Token::TRAINER), grpc::PERMISSION_DENIED,
       "the role ADMIN is needed; the token has the role TRAINER"},
      {"Drain", Drain, false, of(Token::LOADER), grpc::PERMISSION_DENIED,
       "the role ADMIN is needed; the token has the role LOADER"},
      {"AssignRows", Assign, false, of(Token::LOADER), grpc::INVALID_ARGUMENT, ""},
      {"Lookup", Lookup, false, of(Token::CLUSTER), grpc::PERMISSION_DENIED, "READER is needed"},
      {"ShardService/GetStatus", ShardStatus, true, of(Token::TRAINER), grpc::PERMISSION_DENIED,
       "the role CLUSTER is needed"},
      {"ShardService/GetStatus", ShardStatus, true, of(Token::ADMIN), grpc::PERMISSION_DENIED,
       "the token has the role ADMIN"},
      {"ShardService/GetStatus", ShardStatus, true, "", grpc::UNAUTHENTICATED, "no token"},
      {"ShardService/GetStatus", ShardStatus, true, of(Token::CLUSTER), grpc::OK, ""},
  };
  for (const auto& bad : cases) {
    const std::string address = bad.shard ? cluster->shard_address(0) : cluster->address();
    const int refusals =
        CountLines(bad.shard ? cluster->ShardLog(0) : cluster->CoordinatorLog(), {"refused"});
    for (int i = 0; i < kAttempts; ++i) {
      const grpc::Status status = WithToken(address, bad.token, bad.call);
      EXPECT_EQ(status.error_code(), bad.code)
          << bad.method << ", \"" << bad.token << "\": " << status.error_message();
      EXPECT_THAT(status.error_message(), HasSubstr(bad.log));
    }
    const std::string log = bad.shard ? cluster->ShardLog(0) : cluster->CoordinatorLog();
    if (bad.log.empty()) {
      EXPECT_EQ(CountLines(log, {"refused"}), refusals) << bad.method;
    } else {
      EXPECT_EQ(CountLines(log, {"refused", bad.method, bad.log}), 1) << log;
    }
  }
  for (const std::string& log : {cluster->CoordinatorLog(), cluster->ShardLog(0)}) {
    EXPECT_THAT(log, Not(HasSubstr("the-token-of")));
  }
}

// A coordinator that some other description brought to the shards.
TEST(SecurityTest, ShardsRefuseACoordinatorWithoutTheirToken) {
  const Doors doors;
  const std::unique_ptr<Cluster> cluster = Start(Secure(doors.Tokens()));
  ASSERT_NE(cluster, nullptr);
  const absl::StatusOr<int> rogue = cluster->StartStranger(
      absl::StrCat("shards { address: '", cluster->shard_address(0), "' } shards { address: '",
                   cluster->shard_address(1), "' } coordinators { address: '127.0.0.1:0' }"));
  ASSERT_TRUE(rogue.ok()) << rogue.status();
  client::ClientOptions options;
  options.addresses = {cluster->address(*rogue)};
  auto client = client::Client::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const absl::Status status = (*client)->DeclareModel(GroupModel("m", 0)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << status;
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("shard "), HasSubstr("no token")));
  EXPECT_GE(CountLines(cluster->ShardLog(0), {"refused", "no token"}), 1);
}

// ---- pages and tools

TEST(SecurityTest, PagesNeedATokenToo) {
  const Doors doors;
  const std::unique_ptr<Cluster> cluster = Start(Secure(doors.Tokens()));
  ASSERT_NE(cluster, nullptr);
  for (const std::string& http : {cluster->http_address(), cluster->shard_http_address(0)}) {
    const int port = std::stoi(http.substr(http.rfind(':') + 1));
    const auto get = [port](const std::string& authorization) {
      return HttpCall(
          port, "GET", "/metrics",
          authorization.empty() ? "" : absl::StrCat("Authorization: ", authorization, "\r\n"));
    };
    const std::string refused = get("");
    EXPECT_THAT(refused, AllOf(HasSubstr("HTTP/1.1 401"), HasSubstr("WWW-Authenticate: Bearer"),
                               HasSubstr("WWW-Authenticate: Basic")));
    EXPECT_THAT(get("Bearer the-token-of-nobody"), HasSubstr("HTTP/1.1 401"));
    EXPECT_THAT(get(security::Bearer(Token::CLUSTER)), HasSubstr("HTTP/1.1 403"));
    EXPECT_THAT(get(security::Bearer(Token::READER)),
                AllOf(HasSubstr("HTTP/1.1 200"), HasSubstr("emberd_build_info")));
    const std::string pair = absl::StrCat("me:", security::TokenOf(Token::READER));
    EXPECT_THAT(get("Basic " + absl::Base64Escape(pair)), HasSubstr("HTTP/1.1 200"));
    EXPECT_THAT(HttpGet(port, "/healthz"), HasSubstr("HTTP/1.1 200"));
  }
  const int port =
      std::stoi(cluster->http_address().substr(cluster->http_address().rfind(':') + 1));
  WithToken(cluster->address(), "", Lookup);
  EXPECT_THAT(HttpCall(port, "GET", "/metrics",
                       absl::StrCat("Authorization: ", security::Bearer(Token::READER), "\r\n")),
              HasSubstr("emberd_rpcs_total{code=\"UNAUTHENTICATED\","
                        "method=\"EmbeddingService/Lookup\"} 1"));
  EXPECT_EQ(CountLines(cluster->CoordinatorLog(), {"refused", "/metrics", "client=127.0.0.1"}), 2);
}

// What a command prints, and whether it ended with status 0.
std::pair<bool, std::string> Shell(const Doors& doors, const std::string& command) {
  const std::string out = doors.Path("out");
  const int status = std::system(absl::StrCat(command, " >", out, " 2>&1").c_str());
  return {status == 0, ReadFile(out)};
}

std::pair<int, std::string> Emberctl(const std::vector<std::string>& arguments) {
  std::vector<const char*> argv = {"emberctl"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  std::ostringstream out, err;
  const int code = emberctl::Run(static_cast<int>(argv.size()), argv.data(), out, err);
  return {code, out.str() + err.str()};
}

TEST(SecurityTest, ToolsHaveKeysToo) {
  const Doors doors;
  const std::string security = absl::StrCat(doors.Tls(true), doors.Tokens());
  const std::unique_ptr<Cluster> cluster = Start(Secure(security));
  ASSERT_NE(cluster, nullptr);
  const std::string& address = cluster->address();
  const std::vector<std::string> keys = {"--address", address,
                                         "--ca",      doors.Path("ca.pem"),
                                         "--cert",    doors.Path("client.pem"),
                                         "--key",     doors.Path("client-key.pem")};
  std::vector<std::string> command = keys;
  command.push_back("status");
  auto [code, text] = Emberctl(command);
  EXPECT_EQ(code, 1) << text;
  EXPECT_THAT(text, HasSubstr("UNAUTHENTICATED"));
  command.insert(command.end(),
                 {"--token-file", doors.ca().Write("reader", security::TokenOf(Token::READER))});
  std::tie(code, text) = Emberctl(command);
  EXPECT_EQ(code, 0) << text;

  const std::string curl = absl::StrCat("curl --silent --show-error --fail --noproxy '*' --cacert ",
                                        doors.Path("ca.pem"));
  const std::string url = absl::StrCat(" https://", cluster->http_address(), "/metrics");
  const std::string certificate =
      absl::StrCat(" --cert ", doors.Path("client.pem"), " --key ", doors.Path("client-key.pem"));
  const std::string token =
      absl::StrCat(" -H 'Authorization: ", security::Bearer(Token::READER), "'");
  EXPECT_THAT(Shell(doors, curl + certificate + token + url).second,
              HasSubstr("emberd_build_info"));
  EXPECT_THAT(Shell(doors, curl + certificate + url).second, HasSubstr("401"));
  EXPECT_THAT(Shell(doors, curl + token + url).second, HasSubstr("403"));

  const std::string emberd = BuildPath("bin/emberd health --address ");
  const std::string config = doors.ca().Write(
      "health.textproto",
      absl::StrCat("shards { address: '127.0.0.1:0' } security { ", security, " }"));
  EXPECT_TRUE(
      Shell(doors, absl::StrCat(emberd, address, " --config ", config, " --timeout 60")).first);
  EXPECT_FALSE(Shell(doors, absl::StrCat(emberd, address)).first);
}

}  // namespace security_test
}  // namespace emberd::testing
