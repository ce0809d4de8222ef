// Payloads between coordinators and shards travel in memory that both have, where they are on one
// machine, and the tables get the same bits. That memory is given back, whoever dies, and is never
// used for something else while a shard may still be writing there.
//
// Covers: server/host/shard_backend.cc, server/host/shard_codec.cc
#include <cstdio>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/await.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"
#include "tests/testing/footprint.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace shard_memory_test {

constexpr int64_t kLarge = 4000;  // samples, so that each payload is worth sharing
constexpr int64_t kSmall = 37;
constexpr int kSteps = 4;

// Bytes of regions that a shard has touched itself.
int64_t TouchedBytes(pid_t pid) {
  std::ifstream maps(absl::StrCat("/proc/", pid, "/smaps"));
  int64_t kib = 0;
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long long begin = 0, end = 0;
    long long value = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2) {
      here = absl::StrContains(line, "/memfd:emberd-shard ");
    } else if (here && std::sscanf(line.c_str(), "Rss: %lld", &value) == 1) {
      kib += value;
    }
  }
  return kib * 1024;
}

class ShardMemoryTest : public ::testing::Test {
 protected:
  void Start(const ClusterOptions& options) {
    auto cluster = Cluster::Start(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
  }
  // Of shard i, in its own process or in the coordinator's.
  int Regions(int i = 0) { return RegionsOf(cluster_->shard_process(i)->pid(), "emberd-shard"); }
  int CoordinatorRegions() {
    return RegionsOf(cluster_->coordinator_process(0)->pid(), "emberd-shard");
  }
  // Tries once. The client sends and receives all by TCP.
  std::unique_ptr<client::Client> Connect(absl::Duration deadline = absl::Seconds(60)) {
    client::ClientOptions options = cluster_->client_options();
    options.transport = client::TransportKind::kTcp;
    options.deadline = deadline;
    options.max_attempts = 1;
    auto client = client::Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  // After steps of a new model.
  std::string Train(client::Client& client, const std::string& name, int64_t samples = kLarge) {
    auto model = client.DeclareModel(MixedModel(name));
    EXPECT_TRUE(model.ok()) << model.status();
    for (int step = 0; step < kSteps; ++step) {
      const absl::Status status = TrainStep(client, *model, step, samples);
      EXPECT_TRUE(status.ok()) << status;
    }
    return Digest(client, *model).value_or("none");
  }

  std::thread TrainUntilItFails() {
    return std::thread([client = std::shared_ptr<client::Client>(Connect())] {
      auto model = client->DeclareModel(MixedModel("killed"));
      while (model.ok() && TrainStep(*client, *model, 0, kLarge).ok()) {
      }
    });
  }

  std::unique_ptr<Cluster> cluster_;
};

TEST_F(ShardMemoryTest, TablesHaveTheSameBits) {
  std::vector<std::string> digests;
  for (const bool shared : {false, true}) {
    Start({.shards = 2, .config = shared ? "" : "transport: TCP"});
    digests.push_back(Train(*Connect(), "model"));
    for (const int shard : {0, 1}) EXPECT_EQ(Regions(shard) > 0, shared) << shard;
  }
  EXPECT_EQ(digests[0].size(), 64u);
  EXPECT_EQ(digests[0], digests[1]);
}

// Of few ids and wide rows, the answer alone is long.
TEST_F(ShardMemoryTest, ShardsWriteTheirAnswersThere) {
  constexpr int64_t kRows = 2000;
  for (const char* mode : {"PARTIAL_SUMS", "UNIQUE_ROWS", "AUTO"}) {
    Start({.shards = 1});
    const auto client = Connect();
    auto model = client->DeclareModel(
        absl::StrCat("name: 'wide' optimizer { sgd {} learning_rate: 0.1 } tables { name: 't' "
                     "embedding_dim: 64 result_mode: ",
                     mode, " vocabulary_size: ", kRows, "} features { name: 'f' table: 't' }"));
    ASSERT_TRUE(model.ok()) << model.status();
    std::vector<int64_t> ids(kRows);
    std::iota(ids.begin(), ids.end(), 0);
    const std::vector<client::FeatureIds> features = {
        {"f", client::DenseIds{absl::MakeConstSpan(ids)}}};
    ASSERT_TRUE(client->Lookup(*model, features, {.inference = true}).ok());
    EXPECT_GE(TouchedBytes(cluster_->shard_process(0)->pid()), kRows * 64 * 4) << mode;
  }
}

TEST_F(ShardMemoryTest, SmallPayloadsTravelInMessages) {
  Start({.shards = 1});
  Train(*Connect(), "small", kSmall);
  EXPECT_EQ(Regions(), 0);
}

TEST_F(ShardMemoryTest, RegionsAreUsedAgain) {
  Start({.shards = 1});
  const auto client = Connect();
  Train(*client, "first");
  const int regions = Regions();
  for (int round = 0; round < 5; ++round) Train(*client, absl::StrCat("again", round));
  EXPECT_EQ(Regions(), regions);
}

TEST_F(ShardMemoryTest, WithoutRoomForMorePayloadsAreSent) {
  Start({.shards = 1});
  const std::string shared = Train(*Connect(), "model");
  Start({.shards = 1, .config = "budgets { shared_memory_bytes: 4096 }"});
  EXPECT_EQ(Train(*Connect(), "model"), shared);
  EXPECT_EQ(Regions(), 0);
}

// A call that ends early leaves a shard at work on its answer.
TEST_F(ShardMemoryTest, CallsThatAreGivenUpSpoilNothing) {
  Start({.shards = 2});
  const auto client = Connect();
  auto model = client->DeclareModel(MixedModel("model"));
  ASSERT_TRUE(model.ok()) << model.status();
  const auto batch = MixedBatch(1, kLarge);
  const auto look_up = [&](client::Client& by) {
    return by.Lookup(*model, Features(batch), {.inference = true});
  };
  const auto expected = look_up(*client);
  ASSERT_TRUE(expected.ok()) << expected.status();
  int given_up = 0;
  for (int round = 0; round < 60; ++round) {
    const auto hasty = Connect(absl::Milliseconds(1 + round % 20));
    given_up += look_up(*hasty).ok() ? 0 : 1;
    const auto found = look_up(*client);
    ASSERT_TRUE(found.ok()) << found.status();
    for (size_t i = 0; i < found->activations.size(); ++i) {
      ASSERT_EQ(found->activations[i].values, expected->activations[i].values) << round;
    }
  }
  EXPECT_GT(given_up, 0);
  EXPECT_TRUE(Eventually([&] { return Regions() <= 2; })) << Regions();
}

TEST_F(ShardMemoryTest, KilledCoordinatorsLeaveNothing) {
  // Of steps that were cut off, the shard keeps the gradients where they are, until a coordinator
  // sees that nobody goes on with them.
  Start({.shards = 1, .config = "timeouts { shard_call_ms: 15000 }"});
  const pid_t shard = cluster_->shard_process(0)->pid();
  const int64_t descriptors = FootprintOf(shard).descriptors;
  const std::string before = Train(*Connect(), "before");
  for (int round = 0; round < 20; ++round) {
    EXPECT_GT(Regions(), 0);
    std::thread trainer = TrainUntilItFails();
    absl::SleepFor(absl::Milliseconds(7 * (round % 11)));
    cluster_->KillCoordinator(0);
    trainer.join();
    ASSERT_TRUE(cluster_->RestartCoordinator(0).ok());
    ASSERT_EQ(Train(*Connect(), absl::StrCat("after", round)), before);
  }
  EXPECT_TRUE(Eventually([&] { return Regions() == 1; })) << "there are " << Regions();
  cluster_->KillCoordinator(0);
  EXPECT_TRUE(Eventually([&] { return Regions() == 0; })) << "there are " << Regions();
  EXPECT_TRUE(Eventually([&] { return FootprintOf(shard).descriptors <= descriptors; }))
      << FootprintOf(shard).descriptors << " descriptors, where there were " << descriptors;
}

TEST_F(ShardMemoryTest, KilledShardsLeaveNothingAndShareAgain) {
  Start({.shards = 2});
  const pid_t coordinator = cluster_->coordinator_process(0)->pid();
  const auto client = Connect();
  const std::string before = Train(*client, "model");
  int64_t descriptors = 0;
  for (int round = 0; round < 30; ++round) {
    std::thread trainer = TrainUntilItFails();
    absl::SleepFor(absl::Milliseconds(7 * (round % 11)));
    cluster_->KillShard(0);
    trainer.join();
    ASSERT_TRUE(cluster_->RestartShard(0).ok());
    for (const char* name : {"model", "killed"}) {
      ASSERT_TRUE(Eventually([&] { return client->DropModel(name).ok(); }));
    }
    ASSERT_EQ(Train(*client, "model"), before) << round;
    // It may have been asked too early.
    const auto model = client->DescribeModel("model");
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_TRUE(Eventually([&] {
      return TrainStep(*client, *model, round, kLarge).ok() && Regions() > 0;
    })) << round;
    EXPECT_LE(CoordinatorRegions(), 6) << "those of dead shards are gone";
    if (round == 5) descriptors = FootprintOf(coordinator).descriptors;
  }
  EXPECT_TRUE(Eventually([&] { return FootprintOf(coordinator).descriptors <= descriptors; }))
      << FootprintOf(coordinator).descriptors << " descriptors, where there were " << descriptors;
}

}  // namespace shard_memory_test
}  // namespace emberd::testing
