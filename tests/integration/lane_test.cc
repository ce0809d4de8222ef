// Small requests between processes of one machine do not go by gRPC, and nobody can tell but by the
// clock: the same bits, the same errors, the same rights. What would go wrong: an error, or a call
// that hangs, because of a lane, where gRPC would have found another way; a token that is gone and
// still opens a lane that it opened before; threads and descriptors that stay when somebody dies.
//
// Covers: server/rpc/local_peers.cc, server/host/shard_backend.cc
#include <algorithm>
#include <atomic>
#include <csignal>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/security/testing/tokens.h"
#include "tests/testing/cluster.h"
#include "tests/testing/footprint.h"
#include "tests/testing/metrics.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace lane_test {

using client::TransportKind;
using ::testing::HasSubstr;
using v1::Token;

constexpr int64_t kFew = 12;  // samples of a small request
constexpr int kRounds = 8;

class LaneTest : public ::testing::Test {
 protected:
  void Start(const ClusterOptions& options) {
    auto cluster = Cluster::Start(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
  }
  std::unique_ptr<client::Client> Connect(TransportKind transport = TransportKind::kAuto,
                                          int attempts = 1, bool all_coordinators = false) {
    client::ClientOptions options = cluster_->client_options(all_coordinators);
    options.transport = transport;
    options.max_attempts = attempts;
    auto client = client::Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }
  static client::Model Declare(client::Client& client, const std::string& name) {
    auto model = client.DeclareModel(MixedModel(name));
    EXPECT_TRUE(model.ok()) << model.status();
    return model.value_or(client::Model());
  }
  // For inference.
  static absl::StatusOr<client::LookupResult> LookUp(client::Client& client,
                                                     const client::Model& model, uint64_t seed,
                                                     absl::Duration deadline = absl::Seconds(60)) {
    const std::vector<OwnedIds> batch = MixedBatch(seed, kFew);
    return client.Lookup(model, Features(batch), {.inference = true, .deadline = deadline});
  }
  // Until the client has a lane, and the coordinator one to each shard.
  void Warm(client::Client& client, const client::Model& model) {
    const auto calls = [&] { return std::min(CoordinatorCalls(), ShardCalls(0)); };
    EXPECT_TRUE(Eventually([&] {
      const double before = calls();
      const auto found = LookUp(client, model, 1);
      EXPECT_TRUE(found.ok()) << found.status();
      return calls() > before;
    }));
  }
  // So far, of a process.
  double LaneCalls(const std::string& http) const {
    return MetricSum(FetchMetrics(http, token_), "emberd_lane_calls_total");
  }
  double CoordinatorCalls() { return LaneCalls(cluster_->http_address()); }
  double ShardCalls(int shard) { return LaneCalls(cluster_->shard_http_address(shard)); }
  static double Requests(const std::string& http, const std::string& rpc) {
    return MetricSum(FetchMetrics(http), "emberd_rpcs_total", absl::StrCat("method=\"", rpc, "\""));
  }

  // Of the coordinator, now.
  double InFlight() const {
    return MetricSum(FetchMetrics(cluster_->http_address(), token_), "emberd_in_flight_requests");
  }

  std::unique_ptr<Cluster> cluster_;
  std::string token_;  // for metrics
};

std::vector<float> ValuesOf(const client::LookupResult& found) {
  std::vector<float> values;
  for (const client::Activation& activation : found.activations) {
    values.insert(values.end(), activation.values.begin(), activation.values.end());
  }
  return values;
}

TEST_F(LaneTest, TablesHaveTheSameBits) {
  std::vector<std::string> digests;
  for (const bool lanes : {true, false}) {
    Start({.shards = 2, .config = lanes ? "" : "transport: TCP"});
    const auto client = Connect();
    const client::Model model = Declare(*client, "model");
    for (int step = 0; step < kRounds; ++step) {
      const absl::Status status = TrainStep(*client, model, step, kFew);
      ASSERT_TRUE(status.ok()) << status;
    }
    digests.push_back(Digest(*client, model).value_or("none"));
    EXPECT_EQ(CoordinatorCalls() > 0, lanes);
    for (const int shard : {0, 1}) EXPECT_EQ(ShardCalls(shard) > 0, lanes);
    // Each is a request as by gRPC.
    EXPECT_EQ(Requests(cluster_->http_address(), "EmbeddingService/Lookup"), kRounds);
    EXPECT_EQ(Requests(cluster_->shard_http_address(0), "ShardService/Gather"), kRounds);
  }
  EXPECT_EQ(digests[0].size(), 64u);
  EXPECT_EQ(digests[0], digests[1]);
}

TEST_F(LaneTest, LookupsHaveTheSameBits) {
  Start({.shards = 2});
  const auto by_lane = Connect();
  const auto by_tcp = Connect(TransportKind::kTcp);
  const client::Model model = Declare(*by_lane, "model");
  ASSERT_TRUE(TrainStep(*by_tcp, model, 1, 400).ok());
  Warm(*by_lane, model);
  for (int seed = 0; seed < 20; ++seed) {
    const double before = CoordinatorCalls();
    const auto one = LookUp(*by_lane, model, seed);
    EXPECT_EQ(CoordinatorCalls(), before + 1);
    const auto other = LookUp(*by_tcp, model, seed);
    EXPECT_EQ(CoordinatorCalls(), before + 1);
    ASSERT_TRUE(one.ok() && other.ok()) << one.status() << other.status();
    EXPECT_EQ(ValuesOf(*one), ValuesOf(*other));
    EXPECT_EQ(one->statistics.num_minibatches, other->statistics.num_minibatches);
  }
}

TEST_F(LaneTest, LargeRequestsGoByGrpc) {
  Start({.shards = 1});
  const auto client = Connect();
  const client::Model model = Declare(*client, "model");
  Warm(*client, model);
  const double before = CoordinatorCalls(), gathers = ShardCalls(0);
  for (int step = 0; step < 3; ++step) ASSERT_TRUE(TrainStep(*client, model, step, 4000).ok());
  EXPECT_EQ(CoordinatorCalls(), before);
  EXPECT_EQ(ShardCalls(0), gathers);
}

TEST_F(LaneTest, ErrorsAreTheSame) {
  Start({.shards = 2});
  const auto by_lane = Connect();
  const auto by_tcp = Connect(TransportKind::kTcp);
  client::Model model = Declare(*by_lane, "model");
  Warm(*by_lane, model);
  client::Model unknown = model;
  unknown.id ^= 5;
  std::vector<OwnedIds> bad = MixedBatch(1, kFew);
  for (OwnedIds& feature : bad) {
    for (int32_t& id : feature.narrow) id = 2'000'000'000;
    for (int64_t& id : feature.wide) id = -1;
  }
  std::vector<OwnedIds> uneven = MixedBatch(1, kFew);
  uneven.pop_back();
  const std::vector<OwnedIds> good = MixedBatch(1, kFew);
  const auto compare = [&](const client::Model& asked, const std::vector<OwnedIds>& batch) {
    const double before = CoordinatorCalls();
    const auto one = by_lane->Lookup(asked, Features(batch), {.inference = true});
    const auto other = by_tcp->Lookup(asked, Features(batch), {.inference = true});
    EXPECT_FALSE(one.ok());
    EXPECT_EQ(one.status(), other.status());
    EXPECT_EQ(CoordinatorCalls(), before + 1) << "asked on a lane, and once";
  };
  compare(unknown, good);
  compare(model, bad);
  compare(model, uneven);
  ASSERT_TRUE(by_tcp->DropModel("model").ok());
  compare(model, good);
}

TEST_F(LaneTest, AShardThatIsKilledIsFoundAgain) {
  Start({.shards = 2});
  const auto client = Connect();
  const client::Model model = Declare(*client, "model");
  Warm(*client, model);
  const auto before = LookUp(*client, model, 1);
  ASSERT_TRUE(before.ok());
  EXPECT_GT(ShardCalls(1), 0);
  cluster_->KillShard(1);
  const auto dead = LookUp(*client, model, 1);
  EXPECT_EQ(dead.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(dead.status().message()), HasSubstr("shard 1 at "));
  ASSERT_TRUE(cluster_->RestartShard(1).ok());
  // What it had is lost, as gRPC would say.
  EXPECT_TRUE(Eventually([&] { return absl::IsDataLoss(LookUp(*client, model, 1).status()); }));
  ASSERT_TRUE(client->ResetModel("model").ok());
  const auto after = LookUp(*client, model, 1);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(ValuesOf(*after), ValuesOf(*before));
  EXPECT_TRUE(Eventually([&] { return LookUp(*client, model, 1).ok() && ShardCalls(1) > 0; }))
      << "by lanes again";
}

// While it works on a call, which gRPC then says the reason for.
TEST_F(LaneTest, AShardIsKilledInTheMiddleOfACall) {
  Start({.shards = 2});
  const auto client = Connect();
  const client::Model model = Declare(*client, "model");
  Warm(*client, model);
  cluster_->SuspendShard(1);
  std::thread caller([&] {
    const absl::Status status = LookUp(*client, model, 1).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), HasSubstr("shard 1 at "));
  });
  EXPECT_TRUE(Eventually([&] { return InFlight() > 0; }));
  cluster_->KillShard(1);
  caller.join();
}

// No lookup fails: clients turn to the other coordinator, as they would by gRPC.
TEST_F(LaneTest, ACoordinatorIsKilledInTheMiddleOfCalls) {
  Start({.shards = 1, .coordinators = 2});
  const auto declarer = Connect();
  const client::Model model = Declare(*declarer, "model");
  Warm(*declarer, model);
  const auto expected = LookUp(*declarer, model, 3);
  ASSERT_TRUE(expected.ok());
  std::atomic<bool> stop = false;
  std::atomic<int> done = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      const auto client = Connect(TransportKind::kAuto, /*attempts=*/6, /*all=*/true);
      while (!stop) {
        const auto found = LookUp(*client, model, 3);
        ASSERT_TRUE(found.ok()) << found.status();
        EXPECT_EQ(ValuesOf(*found), ValuesOf(*expected));
        ++done;
      }
    });
  }
  EXPECT_TRUE(Eventually([&] { return done > 100; }));
  EXPECT_GT(CoordinatorCalls(), 0);
  const int64_t descriptors = FootprintOf(cluster_->shard_process(0)->pid()).descriptors;
  cluster_->KillCoordinator(0);
  const int at_kill = done;
  EXPECT_TRUE(Eventually([&] { return done > at_kill + 100; }));
  EXPECT_GT(LaneCalls(cluster_->http_address(1)), 0);
  stop = true;
  for (std::thread& thread : threads) thread.join();
  // The shard has let go of the dead one's lanes, whose place those of the other have taken.
  EXPECT_TRUE(Eventually([&] {
    return FootprintOf(cluster_->shard_process(0)->pid()).descriptors <= descriptors + 8;
  }));
}

TEST_F(LaneTest, ClientsThatGoLeaveNothingBehind) {
  Start({.shards = 1});
  const auto client = Connect();
  const client::Model model = Declare(*client, "model");
  Warm(*client, model);
  const pid_t pid = cluster_->coordinator_process(0)->pid();
  const Footprint before = FootprintOf(pid);
  constexpr int kClients = 30;
  {
    std::vector<std::unique_ptr<client::Client>> clients;
    for (int i = 0; i < kClients; ++i) {
      clients.push_back(Connect());
      Warm(*clients.back(), model);
    }
    EXPECT_GT(FootprintOf(pid).threads, before.threads + kClients / 2);
  }
  // Those of other pools come and go as they are needed.
  EXPECT_TRUE(Eventually([&] {
    const Footprint now = FootprintOf(pid);
    return now.descriptors < before.descriptors + kClients / 2 &&
           now.threads < before.threads + kClients / 2;
  }));
}

TEST_F(LaneTest, NoCallOutlastsItsDeadline) {
  Start({.shards = 2});
  const auto client = Connect();
  const client::Model model = Declare(*client, "model");
  Warm(*client, model);
  cluster_->SuspendShard(1);
  const auto stuck = LookUp(*client, model, 1, absl::Seconds(3));
  EXPECT_EQ(stuck.status().code(), absl::StatusCode::kDeadlineExceeded) << stuck.status();
  cluster_->ResumeShard(1);
  EXPECT_TRUE(LookUp(*client, model, 1).ok());
  cluster_->SuspendCoordinator(0);
  EXPECT_EQ(LookUp(*client, model, 1, absl::Seconds(3)).status(),
            absl::DeadlineExceededError("Deadline Exceeded"));
  cluster_->ResumeCoordinator(0);
  EXPECT_TRUE(LookUp(*client, model, 1).ok());
}

// Cancelled on the way to the shard too, where nothing of the call is left.
TEST_F(LaneTest, CallsCanBeCancelled) {
  Start({.shards = 1});
  const auto client = Connect();
  const client::Model model = Declare(*client, "model");
  Warm(*client, model);
  cluster_->SuspendShard(0);
  std::thread caller([&] {
    const std::vector<OwnedIds> batch = MixedBatch(1, kFew);
    // Of a batch that is kept, a shard's lane is waited for until the deadline.
    const absl::Status status =
        client->Lookup(model, Features(batch), {.deadline = absl::Minutes(5)}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  });
  EXPECT_TRUE(Eventually([&] { return InFlight() > 0; }));
  client->CancelCalls();
  caller.join();
  EXPECT_TRUE(Eventually([&] { return InFlight() == 0; }));
  cluster_->ResumeShard(0);
  EXPECT_TRUE(LookUp(*client, model, 1).ok());
}

class LaneTokenTest : public LaneTest {
 protected:
  void WriteTokens(const std::vector<Token::Role>& roles) {
    std::ofstream file(directory_.path() + "/tokens", std::ios::trunc);
    for (const Token::Role role : roles) {
      // Each token may be given another role.
      file << "tokens { name: '" << Token::Role_Name(role) << "' role: " << Token::Role_Name(role)
           << " sha256: '" << Sha256Hex(security::TokenOf(role)) << "' }\n";
    }
  }
  void StartWithTokens() {
    token_ = security::TokenOf(Token::ADMIN);
    WriteTokens({Token::READER, Token::TRAINER, Token::ADMIN, Token::CLUSTER});
    std::ofstream(directory_.path() + "/cluster") << security::TokenOf(Token::CLUSTER);
    Start({.shards = 1,
           .config =
               absl::StrCat("security { tokens_file: '", directory_.path(),
                            "/tokens' cluster_token_file: '", directory_.path(), "/cluster' }")});
  }
  std::unique_ptr<client::Client> ConnectAs(Token::Role role,
                                            TransportKind transport = TransportKind::kAuto) {
    client::ClientOptions options = cluster_->client_options();
    options.transport = transport;
    options.max_attempts = 1;
    options.token = security::TokenOf(role);
    auto client = client::Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  const TempDir directory_ = *TempDir::Create();
};

TEST_F(LaneTokenTest, RolesAreThoseOfGrpc) {
  StartWithTokens();
  const auto trainer = ConnectAs(Token::TRAINER);
  const client::Model model = Declare(*trainer, "model");
  Warm(*trainer, model);
  const std::vector<OwnedIds> batch = MixedBatch(1, kFew);
  EXPECT_TRUE(trainer->Lookup(model, Features(batch)).ok());
  const auto reader = ConnectAs(Token::READER);
  Warm(*reader, model);
  const double before = CoordinatorCalls();
  const absl::Status refused = reader->Lookup(model, Features(batch)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(refused,
            ConnectAs(Token::READER, TransportKind::kTcp)->Lookup(model, Features(batch)).status());
  EXPECT_EQ(CoordinatorCalls(), before + 1);
}

// Would catch: a lane that remembers who has opened it.
TEST_F(LaneTokenTest, ATokenThatIsGoneClosesItsLanes) {
  StartWithTokens();
  const auto trainer = ConnectAs(Token::TRAINER);
  const client::Model model = Declare(*trainer, "model");
  const auto reader = ConnectAs(Token::READER);
  Warm(*trainer, model);
  Warm(*reader, model);
  WriteTokens({Token::TRAINER, Token::ADMIN, Token::CLUSTER});
  cluster_->coordinator_process(0)->Signal(SIGHUP);
  EXPECT_TRUE(
      Eventually([&] { return absl::IsUnauthenticated(LookUp(*reader, model, 1).status()); }));
  EXPECT_EQ(LookUp(*reader, model, 1).status(),
            LookUp(*ConnectAs(Token::READER, TransportKind::kTcp), model, 1).status());
  EXPECT_THAT(cluster_->CoordinatorLog(), HasSubstr("EmbeddingService/Lookup"));
  const double before = CoordinatorCalls();
  EXPECT_TRUE(LookUp(*trainer, model, 1).ok()) << "others go on";
  EXPECT_EQ(CoordinatorCalls(), before + 1);
  WriteTokens({Token::READER, Token::TRAINER, Token::ADMIN, Token::CLUSTER});
  cluster_->coordinator_process(0)->Signal(SIGHUP);
  EXPECT_TRUE(Eventually([&] { return LookUp(*reader, model, 1).ok(); }));
}

}  // namespace lane_test
}  // namespace emberd::testing
