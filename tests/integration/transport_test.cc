// However ids, activations and gradients travel, the tables get the same bits. And memory that is
// shared is given back, whoever dies: a coordinator, or a trainer in the middle of a step.
//
// Covers: client/cpp/shared_memory.cc
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"
#include "tests/testing/footprint.h"
#include "tests/testing/group_training.h"
#include "tests/testing/process.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace transport_test {

using client::TransportKind;
using client::WireType;

constexpr int kSteps = 20;

// What coordinators give.
int Regions(pid_t pid) { return RegionsOf(pid, "emberd"); }

class TransportTest : public ::testing::Test {
 protected:
  void Start(const ClusterOptions& options) {
    auto cluster = Cluster::Start(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
  }
  std::unique_ptr<client::Client> Connect(TransportKind transport,
                                          WireType type = WireType::kFloat32) {
    client::ClientOptions options = cluster_->client_options();
    options.transport = transport;
    options.activation_type = options.gradient_type = type;
    auto client = client::Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }
  int ShardRegions(int i) { return Regions(cluster_->shard_process(i)->pid()); }
  int CoordinatorRegions() { return Regions(cluster_->coordinator_process(0)->pid()); }

  // After unary steps with every form of input.
  std::string UnaryDigest(client::Client& client, const std::string& name) {
    auto model = client.DeclareModel(MixedModel(name));
    EXPECT_TRUE(model.ok()) << model.status();
    for (int step = 0; step < kSteps; ++step) {
      const absl::Status status = TrainStep(client, *model, step, /*samples=*/37);
      EXPECT_TRUE(status.ok()) << status;
    }
    return Digest(client, *model).value_or("none");
  }
  // After steps on a stream.
  std::string StreamDigest(client::Client& client, const std::string& name, bool pipelined) {
    auto model = client.DeclareModel(GroupModel(name, /*limit=*/4));
    EXPECT_TRUE(model.ok()) << model.status();
    auto stream = client.Train(*model, {.group = "run", .pipelined = pipelined});
    EXPECT_TRUE(stream.ok()) << stream.status();
    const absl::Status status = RunSteps(**stream, 0, 1, 0, kSteps, pipelined);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE((*stream)->Finish().ok());
    return Digest(client, *model).value_or("none");
  }

  std::unique_ptr<Cluster> cluster_;
};

TEST_F(TransportTest, TablesHaveTheSameBits) {
  Start({.shards = 2});
  for (const WireType type : {WireType::kFloat32, WireType::kBfloat16}) {
    const std::string suffix = type == WireType::kFloat32 ? "f" : "b";
    const auto tcp = Connect(TransportKind::kTcp, type);
    const std::string unary = UnaryDigest(*tcp, "unary_tcp_" + suffix);
    const std::string stream = StreamDigest(*tcp, "stream_tcp_" + suffix, false);
    const std::string pipelined = StreamDigest(*tcp, "pipelined_tcp_" + suffix, true);
    EXPECT_EQ(CoordinatorRegions(), 0);
    {
      const auto shared = Connect(TransportKind::kShared, type);
      EXPECT_EQ(UnaryDigest(*shared, "unary_shared_" + suffix), unary);
      EXPECT_GT(CoordinatorRegions(), 0);
      // They write and read there, too, but for what has to be converted.
      for (const int shard : {0, 1}) EXPECT_EQ(ShardRegions(shard) > 0, suffix == "f") << shard;
      EXPECT_EQ(StreamDigest(*shared, "stream_shared_" + suffix, false), stream);
      EXPECT_EQ(StreamDigest(*shared, "pipelined_shared_" + suffix, true), pipelined);
    }
    EXPECT_TRUE(Eventually([&] { return CoordinatorRegions() == 0; }));
    for (const int shard : {0, 1})
      EXPECT_TRUE(Eventually([&] { return ShardRegions(shard) == 0; }));
  }
}

// What shards write straight into a trainer's memory, and what several of them have to add up.
TEST_F(TransportTest, ActivationsHaveTheSameBitsForAnyNumberOfShards) {
  std::vector<std::string> digests;
  for (const int shards : {1, 2, 4}) {
    for (const bool embedded : {false, true}) {
      Start({.shards = shards, .sparsecores_per_shard = 4 / shards, .embedded = embedded});
      const auto client = Connect(TransportKind::kShared);
      digests.push_back(UnaryDigest(*client, "unary") + StreamDigest(*client, "stream", false));
    }
  }
  for (const std::string& digest : digests) EXPECT_EQ(digest, digests[0]);
}

// A log must hold what is applied, so that its shards are sent the gradients.
TEST_F(TransportTest, WithALogGradientsAreCopiedToTheShards) {
  auto folder = TempDir::Create();
  ASSERT_TRUE(folder.ok());
  Start({.shards = 2});
  const std::string expected =
      StreamDigest(*Connect(TransportKind::kShared), "model", /*pipelined=*/true);
  Start({.shards = 2,
         .config = absl::StrCat("storage { durability: LOG directory: '", folder->path(), "' }")});
  const auto client = Connect(TransportKind::kShared);
  EXPECT_EQ(StreamDigest(*client, "model", /*pipelined=*/true), expected);
  for (const int shard : {0, 1}) {
    cluster_->KillShard(shard);
    ASSERT_TRUE(cluster_->RestartShard(shard).ok());
  }
  auto model = Await([&] { return client->DeclareModel(GroupModel("model", /*limit=*/4)); });
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(Await([&] { return Digest(*client, *model); }).value_or("none"), expected);
  cluster_ = nullptr;  // it may be about to save to the folder
}

TEST_F(TransportTest, SmallArraysTravelInMessagesUnlessTheyAreToBeShared) {
  Start({.shards = 1});
  const auto usual = Connect(TransportKind::kAuto);
  UnaryDigest(*usual, "small");
  EXPECT_EQ(CoordinatorRegions(), 0);
}

TEST_F(TransportTest, ACoordinatorThatIsToUseTcpSharesNothing) {
  Start({.shards = 1, .config = "transport: TCP"});
  const auto shared = Connect(TransportKind::kShared);
  EXPECT_EQ(UnaryDigest(*shared, "shared").size(), 64u);
  EXPECT_EQ(CoordinatorRegions(), 0);
}

TEST_F(TransportTest, WithoutRoomForMoreClientsGoOnByTcp) {
  Start({.shards = 1, .config = "budgets { shared_memory_bytes: 4096 }"});
  const auto tcp = Connect(TransportKind::kTcp);
  const auto shared = Connect(TransportKind::kShared);
  EXPECT_EQ(StreamDigest(*shared, "shared", false), StreamDigest(*tcp, "tcp", false));
  EXPECT_LE(CoordinatorRegions(), 1);
}

TEST_F(TransportTest, GradientsAreReadWhereTheTrainerPutsThem) {
  Start({.shards = 2});
  const auto client = Connect(TransportKind::kShared);
  std::vector<std::string> digests;
  for (const bool in_place : {false, true}) {
    auto model = client->DeclareModel(GroupModel(in_place ? "in_place" : "copied", 0));
    ASSERT_TRUE(model.ok()) << model.status();
    auto stream = client->Train(*model, {.group = "run"});
    ASSERT_TRUE(stream.ok()) << stream.status();
    for (int64_t step = 0; step < kSteps; ++step) {
      const Share share = MakeShare(step, 0, 1);
      ASSERT_TRUE((*stream)->SendLookup(step, share.Features()).ok());
      auto found = (*stream)->ReceiveLookup();
      ASSERT_TRUE(found.ok()) << found.status();
      const auto gradients = ShareGradients(step, share, found->activations);
      std::vector<client::FeatureGradient> request;
      std::vector<std::shared_ptr<float>> memory;
      for (size_t i = 0; i < gradients.size(); ++i) {
        absl::Span<const float> values = gradients[i];
        if (in_place) {
          memory.push_back((*stream)->AllocateGradients(values.size() + 3));
          std::copy(values.begin(), values.end(), memory.back().get() + 3);
          values = absl::MakeConstSpan(memory.back().get() + 3, values.size());
        }
        request.push_back({share.features[i], values, found->activations[i].samples});
      }
      client::UpdateOptions options;
      if (in_place) options.memory = std::make_shared<std::vector<std::shared_ptr<float>>>(memory);
      ASSERT_TRUE((*stream)->SendUpdate(step, request, options).ok());
      options.memory.reset();
      memory.clear();  // it is kept as long as it is needed
      ASSERT_TRUE((*stream)->ReceiveUpdate().ok());
    }
    ASSERT_TRUE((*stream)->Finish().ok());
    digests.push_back(Digest(*client, *model).value_or("none"));
  }
  EXPECT_EQ(digests[0], digests[1]);
}

// The coordinator reads them until then.
TEST_F(TransportTest, MemoryThatIsReadInPlaceIsHeldUntilTheAnswer) {
  Start({.shards = 1});
  const auto client = Connect(TransportKind::kShared);
  const auto model = client->DeclareModel(GroupModel("model", 0));
  ASSERT_TRUE(model.ok()) << model.status();
  std::vector<std::unique_ptr<client::TrainStream>> streams(2);
  const auto join = [&](int rank) {
    auto stream = client->Train(*model, {.group = "run", .rank = rank, .size = 2});
    ASSERT_TRUE(stream.ok()) << stream.status();
    streams[rank] = *std::move(stream);
  };
  std::thread other(join, 1);
  join(0);
  other.join();
  ASSERT_TRUE(streams[0] != nullptr && streams[1] != nullptr);
  std::vector<client::Activation> activations;
  for (const int rank : {0, 1}) {
    ASSERT_TRUE(streams[rank]->SendLookup(0, MakeShare(0, rank, 2).Features()).ok());
  }
  for (const int rank : {1, 0}) {
    const auto found = streams[rank]->ReceiveLookup();
    ASSERT_TRUE(found.ok()) << found.status();
    activations = found->activations;
  }
  const auto some = std::find_if(activations.begin(), activations.end(),
                                 [](const auto& one) { return one.samples > 0; });
  ASSERT_NE(some, activations.end());
  const size_t floats = some->dim * some->samples;
  const std::shared_ptr<float> place = streams[0]->AllocateGradients(floats);
  std::fill_n(place.get(), floats, 0.5f);
  auto memory = std::make_shared<bool>();
  const std::weak_ptr<bool> held = memory;
  const std::vector<client::FeatureGradient> gradients = {
      {some->feature, absl::MakeConstSpan(place.get(), floats), some->samples}};
  ASSERT_TRUE(
      streams[0]->SendUpdate(0, gradients, {.memory = std::exchange(memory, nullptr)}).ok());
  EXPECT_FALSE(held.expired()) << "it waits for the other rank";
  ASSERT_TRUE(streams[1]->SendUpdate(0, {}).ok());
  ASSERT_TRUE(streams[0]->ReceiveUpdate().ok());
  EXPECT_TRUE(held.expired());
}

TEST_F(TransportTest, ActivationsLieSideBySideIfThatIsAskedFor) {
  Start({.shards = 2});
  std::vector<std::vector<float>> seen;
  for (const auto transport : {TransportKind::kTcp, TransportKind::kShared}) {
    for (const WireType type : {WireType::kFloat32, WireType::kBfloat16}) {
      const auto client = Connect(transport, type);
      auto model = client->DeclareModel(GroupModel("model", 0));
      ASSERT_TRUE(model.ok()) << model.status();
      auto stream = client->Train(*model, {.group = absl::StrCat("run", seen.size())});
      ASSERT_TRUE(stream.ok()) << stream.status();
      std::vector<client::FeatureIds> features;
      const std::vector<int64_t> ids = {1, 2, 3, 4, 5};
      for (const auto& feature : model->features) {
        features.push_back({feature.name, client::DenseIds{absl::MakeConstSpan(ids)}});
      }
      const int64_t step = (*stream)->next_step();
      ASSERT_TRUE((*stream)->SendLookup(step, features, {.concat = true}).ok());
      auto found = (*stream)->ReceiveLookup();
      ASSERT_TRUE(found.ok()) << found.status();
      seen.emplace_back(found->concat.begin(), found->concat.end());
      const client::Activation& second = found->activations[1];
      EXPECT_EQ(second.values.data(), found->concat.data() + found->activations[0].dim);
      ASSERT_TRUE((*stream)->SendUpdate(step, {}, {.skip = true}).ok());
      ASSERT_TRUE((*stream)->ReceiveUpdate().ok());
    }
  }
  ASSERT_EQ(seen.size(), 4u);
  EXPECT_FALSE(seen[0].empty());
  EXPECT_EQ(seen[0], seen[2]);
  EXPECT_EQ(seen[1], seen[3]);
}

TEST_F(TransportTest, AResultMayOutliveEverything) {
  Start({.shards = 1});
  client::LookupResult kept;
  std::vector<float> copy;
  {
    const auto client = Connect(TransportKind::kShared);
    auto model = client->DeclareModel(MixedModel("model"));
    ASSERT_TRUE(model.ok()) << model.status();
    const auto batch = MixedBatch(1, 37);
    auto found = client->Lookup(*model, Features(batch));
    ASSERT_TRUE(found.ok()) << found.status();
    copy.assign(found->activations[0].values.begin(), found->activations[0].values.end());
    kept = *std::move(found);
    EXPECT_EQ(UnaryDigest(*client, "other").size(), 64u);
  }
  cluster_->KillAll();
  EXPECT_THAT(kept.activations[0].values, ::testing::ElementsAreArray(copy));
}

// What this would catch: a block that is not free again, or not for sure, once its answer has come.
TEST_F(TransportTest, LookupsUseTheSameMemoryAgain) {
  Start({.shards = 1});
  const auto client = Connect(TransportKind::kShared);
  auto model = client->DeclareModel(MixedModel("model"));
  ASSERT_TRUE(model.ok()) << model.status();
  const auto batch = MixedBatch(1, 37);
  const float* first = nullptr;
  for (int i = 0; i < 20; ++i) {
    auto found = client->Lookup(*model, Features(batch), {.inference = true});
    ASSERT_TRUE(found.ok()) << found.status();
    if (first == nullptr) first = found->activations[0].values.data();
    EXPECT_EQ(found->activations[0].values.data(), first);
  }
}

TEST_F(TransportTest, ACoordinatorThatComesBackSharesAgain) {
  Start({.shards = 1});
  const auto client = Connect(TransportKind::kShared);
  const std::string first = UnaryDigest(*client, "first");
  for (int round = 0; round < 3; ++round) {
    cluster_->KillCoordinator(0);
    ASSERT_TRUE(cluster_->RestartCoordinator(0).ok());
    EXPECT_EQ(UnaryDigest(*client, absl::StrCat("again", round)), first);
    EXPECT_GT(CoordinatorRegions(), 0);
  }
  EXPECT_LE(Regions(getpid()), 2) << "those of dead coordinators are gone";
}

// Where a trainer that is to be killed finds its coordinator.
constexpr char kTrainerAddress[] = "EMBERD_KILLED_TRAINER";

// Not a test: what the next one runs in processes of their own. Trains until it is killed.
TEST(KilledTrainer, Trains) {
  const char* const address = std::getenv(kTrainerAddress);
  if (address == nullptr) GTEST_SKIP() << "a part of another test";
  client::ClientOptions options;
  options.addresses = {address};
  auto client = client::Client::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  auto model = (*client)->DeclareModel(MixedModel("killed"));
  ASSERT_TRUE(model.ok()) << model.status();
  for (int step = 0;; ++step) {
    const absl::Status status = TrainStep(**client, *model, step, /*samples=*/5000);
    ASSERT_TRUE(status.ok()) << status;
  }
}

TEST_F(TransportTest, KilledTrainersLeaveNothingAndSpoilNothing) {
  Start({.shards = 2});
  const auto client = Connect(TransportKind::kTcp);
  const std::string before = UnaryDigest(*client, "before");
  const pid_t coordinator = cluster_->coordinator_process(0)->pid();
  auto folder = TempDir::Create();
  ASSERT_TRUE(folder.ok());
  setenv(kTrainerAddress, cluster_->address().c_str(), /*replace=*/1);
  int64_t descriptors = 0;
  for (int round = 0; round < 18; ++round) {
    auto trainer = StartProcess({"/proc/self/exe", "--gtest_filter=KilledTrainer.Trains"},
                                folder->Path("log"));
    ASSERT_TRUE(trainer.ok()) << trainer.status();
    ASSERT_TRUE(Eventually([&] { return CoordinatorRegions() > 0; }))
        << ReadFile(folder->Path("log"));
    absl::SleepFor(absl::Milliseconds(3 * (round % 13)));
    (*trainer)->Stop(absl::ZeroDuration());
    ASSERT_TRUE(Eventually([&] { return CoordinatorRegions() == 0; })) << "round " << round;
    ASSERT_TRUE(Eventually([&] { return ShardRegions(0) + ShardRegions(1) == 0; }))
        << "round " << round;
    if (round == 5) descriptors = FootprintOf(coordinator).descriptors;
  }
  unsetenv(kTrainerAddress);
  // A trainer that left one behind would show 12 times. A thread of gRPC's may have opened one
  // since.
  constexpr int64_t kOther = 4;
  EXPECT_TRUE(Eventually([&] {
    return FootprintOf(coordinator).descriptors <= descriptors + kOther;
  })) << FootprintOf(coordinator).descriptors
      << " descriptors, where there were " << descriptors;
  EXPECT_EQ(UnaryDigest(*client, "after"), before);
}

}  // namespace transport_test
}  // namespace emberd::testing
