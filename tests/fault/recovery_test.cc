// storage.durability CHECKPOINT: models are saved by themselves, and rows that shards have lost
// come back from the newest good checkpoint, on all shards together, with nobody asking for it.
// What was given up on purpose does not.
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fault/eviction_cluster.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/metrics.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace recovery_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class RecoveryTest : public ClusterFixture {
 protected:
  void SetUp() override { ASSERT_NO_FATAL_FAILURE(Start({})); }
  void Start(const std::map<std::string, std::string>& failpoints, int every_seconds = 100'000,
             const std::string& more = "timeouts { drain_ms: 60000 }") {
    StartCluster({.shards = 2,
                  .coordinators = 2,
                  .config = absl::StrCat("storage { directory: \"", storage_.path(),
                                         "\" durability: CHECKPOINT every_seconds: ", every_seconds,
                                         " } ", more),
                  .failpoints = failpoints},
                 MixedModel("mixed"));
    ASSERT_NO_FATAL_FAILURE(AwaitCheckpoints(1));
    initial_ = TableDigest();
  }

  std::vector<client::CheckpointInfo> List() {
    auto list = client_->ListCheckpoints("mixed");
    EXPECT_TRUE(list.ok()) << list.status();
    return list.ok() ? list->checkpoints : std::vector<client::CheckpointInfo>();
  }
  // Until there are at least so many.
  void AwaitCheckpoints(size_t count) {
    ASSERT_TRUE(Eventually([&] { return List().size() >= count; }));
  }
  void Train(int step) { ASSERT_TRUE(TrainStep(*client_, model_, step, 32).ok()); }
  void Save(const std::string& name) {
    auto saved = client_->SaveCheckpoint("mixed", {.name = name});
    ASSERT_TRUE(saved.ok()) << saved.status();
  }
  void LoseShard(int shard) {
    cluster_->KillShard(shard);
    ASSERT_TRUE(cluster_->RestartShard(shard).ok());
  }
  // And starts them again.
  void KillAll() {
    for (const int i : {0, 1}) cluster_->KillCoordinator(i);
    for (const int i : {0, 1}) cluster_->KillShard(i);
    for (const int i : {0, 1}) ASSERT_TRUE(cluster_->RestartShard(i).ok());
    for (const int i : {0, 1}) ASSERT_TRUE(cluster_->RestartCoordinator(i).ok());
  }
  // The tables, once they can be read again. Until then, callers are told that they will be.
  std::string AwaitTables() {
    const auto digest = Await([&] {
      auto read = Digest(*client_, model_);
      EXPECT_NE(read.status().code(), absl::StatusCode::kDataLoss) << read.status();
      return read;
    });
    return digest.ok() ? *digest : digest.status().ToString();
  }

  void StopWithSilentShards(const std::vector<int>& silent) {
    ASSERT_NO_FATAL_FAILURE(Start({}, 100'000, "timeouts { drain_ms: 1000 }"));
    const auto other = client_->DeclareModel(MixedModel("other"));
    ASSERT_TRUE(other.ok()) << other.status();
    Train(0);
    ASSERT_TRUE(TrainStep(*client_, *other, 0, 32).ok());
    for (const int shard : silent) cluster_->SuspendShard(shard);
    cluster_->coordinator_process(0)->Signal(SIGTERM);
    EXPECT_TRUE(cluster_->coordinator_process(0)->WaitFor(absl::Minutes(2)));
    for (const int shard : silent) cluster_->ResumeShard(shard);
    const std::string log = cluster_->CoordinatorLog(0);
    std::string unsaved;
    for (const auto line : absl::StrSplit(log, '\n')) {
      if (absl::StrContains(line, "could not be saved before the stop")) {
        absl::StrAppend(&unsaved, line, "\n");
      }
    }
    EXPECT_THAT(unsaved, AllOf(HasSubstr("mixed"), HasSubstr("other"))) << log;
  }

  const TempDir storage_ = *TempDir::Create();
  std::string initial_;
};

TEST_F(RecoveryTest, LostRowsComeBackWithAllOthers) {
  Train(0);
  const std::string saved = TableDigest();
  ASSERT_NE(saved, initial_);
  Save("mine");
  Train(1);
  ASSERT_NE(TableDigest(), saved);
  for (const int shard : {1, 0}) {
    LoseShard(shard);
    EXPECT_EQ(AwaitTables(), saved) << "after the loss of shard " << shard;
  }
  EXPECT_GE(MetricSum(FetchMetrics(cluster_->http_address(0)), "emberd_model_recoveries_total") +
                MetricSum(FetchMetrics(cluster_->http_address(1)), "emberd_model_recoveries_total"),
            2);
  Train(2);  // and training goes on
}

TEST_F(RecoveryTest, AllProcessesMayDieAtOnce) {
  Train(0);
  const std::string saved = TableDigest();
  Save("mine");
  KillAll();
  // A trainer that declares its model again gets the rows, not initial ones.
  const auto model = Await([&] { return client_->DeclareModel(MixedModel("mixed")); });
  ASSERT_TRUE(model.ok()) << model.status();
  model_ = *model;
  EXPECT_EQ(AwaitTables(), saved);
}

TEST_F(RecoveryTest, RowsThatWereGivenUpStayGone) {
  Train(0);
  Save("mine");
  std::set<std::string> before;
  for (const client::CheckpointInfo& info : List()) before.insert(info.name);
  ASSERT_TRUE(client_->ResetModel("mixed").ok());
  ASSERT_TRUE(Eventually([&] {  // of the rows as they are now
    const auto list = List();
    return std::any_of(list.begin(), list.end(),
                       [&](const auto& info) { return !before.contains(info.name); });
  }));
  LoseShard(1);
  EXPECT_EQ(AwaitTables(), initial_);

  ASSERT_TRUE(client_->DropModel("mixed").ok());
  LoseShard(0);
  absl::SleepFor(absl::Seconds(7));  // coordinators look for such models every five seconds
  EXPECT_EQ(client_->DescribeModel("mixed").status().code(), absl::StatusCode::kNotFound);
}

// The drop gives up the checkpoints before any shard drops its rows: a declaration that finds none
// on the shards would bring them back otherwise, through whichever coordinator.
TEST_F(RecoveryTest, AModelThatIsDeclaredWhileItIsDroppedBeginsAnew) {
  for (int round = 0; round < 6; ++round) {
    Train(round);
    Save(absl::StrCat("before-", round));
    client::ClientOptions options = cluster_->client_options();
    options.addresses = {cluster_->address(round % 2)};
    const auto other = client::Client::Connect(options);
    ASSERT_TRUE(other.ok()) << other.status();
    std::atomic<bool> dropped = false;
    std::thread trainer([&] {
      while (!dropped) (*other)->DeclareModel(MixedModel("mixed")).status().IgnoreError();
    });
    const auto drop = client_->DropModel("mixed");
    dropped = true;
    trainer.join();
    ASSERT_TRUE(drop.ok()) << drop.status();
    const auto model = Await([&] { return client_->DeclareModel(MixedModel("mixed")); });
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
    EXPECT_EQ(AwaitTables(), initial_) << "round " << round;
  }
}

TEST_F(RecoveryTest, WhatIsLeftOfADroppedModelIsPruned) {
  Save("mine");
  const auto prune = [&] { return Emberctl(*cluster_, {"checkpoint", "prune", "mixed"}).text; };
  // Both coordinators may have saved one in the same moment: the older one goes at once.
  EXPECT_TRUE(Eventually(
      [&] { return absl::StrContains(prune(), "'auto-*' of model 'mixed': nothing to delete"); }));
  EXPECT_EQ(List().size(), 2u) << "a lost shard would need it";
  EXPECT_THAT(Emberctl(*cluster_, {"model", "drop", "mixed"}).text,
              AllOf(HasSubstr("dropped"), HasSubstr("2 checkpoints: "),
                    HasSubstr("`emberctl checkpoint prune mixed`")));
  EXPECT_EQ(List().size(), 2u);
  EXPECT_THAT(prune(), HasSubstr("'auto-*' of model 'mixed' deleted: "));
  ASSERT_EQ(List().size(), 1u);
  EXPECT_EQ(List()[0].name, "mine");
}

TEST_F(RecoveryTest, CheckpointsOnRequestThatTakeMuchOfTheDiskAreSaidOnce) {
  ASSERT_TRUE(TrainStep(*client_, model_, 0, 1024).ok());
  for (const char* name : {"a", "b", "c", "d", "e", "f"}) Save(name);
  const std::string log = cluster_->CoordinatorLog(0) + cluster_->CoordinatorLog(1);
  const size_t said = log.find("checkpoints saved on request take much of the disk");
  ASSERT_NE(said, std::string::npos) << log;
  EXPECT_EQ(log.find("take much of the disk", said + 50), std::string::npos) << log;

  // The coordinator that saved or deleted last counts what is listed.
  const auto counted = [&] {
    std::vector<double> bytes;
    for (int i = 0; i < 2; ++i) {
      bytes.push_back(
          MetricSum(FetchMetrics(cluster_->http_address(i)), "emberd_checkpoint_stored_bytes"));
    }
    return bytes;
  };
  const auto listed = [&] {
    double bytes = 0;
    for (const client::CheckpointInfo& info : List()) bytes += info.bytes;
    return bytes;
  };
  const auto is_listed = [&] { return absl::c_linear_search(counted(), listed()); };
  EXPECT_TRUE(Eventually(is_listed));
  ASSERT_TRUE(client_->DeleteCheckpoint("mixed", "a").ok());
  EXPECT_TRUE(Eventually(is_listed));
}

TEST_F(RecoveryTest, AnOlderCheckpointServesWhereTheNewestIsDamaged) {
  Train(0);
  const std::string saved = TableDigest();
  Save("good");
  Train(1);
  Save("bad");
  int changed = 0;
  for (const auto& file :
       std::filesystem::directory_iterator(storage_.path() + "/checkpoints/mixed/bad")) {
    if (file.path().extension() != ".safetensors") continue;
    std::fstream bytes(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekg(-9, std::ios::end);
    const char flipped = static_cast<char>(bytes.peek() ^ 1);
    bytes.seekp(-9, std::ios::end);
    bytes.put(flipped);
    ++changed;
  }
  ASSERT_GT(changed, 0);
  LoseShard(1);
  EXPECT_EQ(AwaitTables(), saved);
  EXPECT_THAT(cluster_->CoordinatorLog(0) + cluster_->CoordinatorLog(1),
              HasSubstr("a checkpoint is damaged"));
}

TEST_F(RecoveryTest, OperatorsHearOfADamagedManifestThatARecoveryPassesOver) {
  Train(0);
  const std::string saved = TableDigest();
  Save("good");
  Train(1);
  Save("bad");
  const std::string manifest = storage_.path() + "/checkpoints/mixed/bad/manifest.json";
  std::filesystem::resize_file(manifest, 9);
  LoseShard(1);
  EXPECT_EQ(AwaitTables(), saved);
  EXPECT_TRUE(Eventually([&] {
    const std::string log = cluster_->CoordinatorLog(0) + cluster_->CoordinatorLog(1);
    return absl::StrContains(log, "a checkpoint is damaged") && absl::StrContains(log, manifest);
  }));
}

class RecoveryFaultTest : public RecoveryTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(Start({{"shard-1", "restore.rows_are_here=die"}}));
  }
};

// It does not know the restore when it is back, which says nothing against the checkpoint.
TEST_F(RecoveryFaultTest, AShardThatDiesInARecoveryDoesNotBringBackAnOlderCheckpoint) {
  Train(0);
  Save("older");
  Train(1);
  const std::string saved = TableDigest();
  Save("later");
  LoseShard(0);
  ASSERT_TRUE(Eventually([&] { return !cluster_->shard_process(1)->Running(); }));
  cluster_->KillShard(1);
  ASSERT_TRUE(cluster_->RestartShard(1).ok());
  EXPECT_EQ(AwaitTables(), saved);
  EXPECT_THAT(cluster_->CoordinatorLog(0) + cluster_->CoordinatorLog(1),
              Not(HasSubstr("a checkpoint is damaged")));
}

class MergeInRecoveryTest : public RecoveryTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(Start({{"shard-1", "restore.rows_are_next=stop"}}));
  }
};

// The merge takes files away that shards are about to read. Taken for damage, the model would go
// back to the checkpoint before.
TEST_F(MergeInRecoveryTest, AMergedCheckpointIsNotTakenForADamagedOne) {
  Train(0);
  Save("older");
  Train(1);
  const std::string saved = TableDigest();
  ASSERT_TRUE(client_->SaveCheckpoint("mixed", {.name = "later", .incremental = true}).ok());
  const std::vector<client::CheckpointInfo> saved_ones = List();
  const auto later =
      absl::c_find_if(saved_ones, [](const auto& info) { return info.name == "later"; });
  ASSERT_TRUE(later != saved_ones.end() && later->chain == 1);
  LoseShard(0);
  ASSERT_TRUE(cluster_->AwaitShardStandstill(1));
  v1::MergeCheckpointRequest merge;
  merge.set_model("mixed");
  merge.set_name("later");
  v1::CheckpointProgress progress;
  const grpc::Status merged = Call(&v1::CheckpointService::Stub::MergeCheckpoint,
                                   Api(cluster_->address()), merge, &progress);
  EXPECT_TRUE(merged.ok()) << merged.error_message();
  cluster_->ResumeShard(1);
  EXPECT_EQ(AwaitTables(), saved);
  EXPECT_THAT(cluster_->CoordinatorLog(0) + cluster_->CoordinatorLog(1),
              Not(HasSubstr("a checkpoint is damaged")));
}

class ClockTest : public RecoveryTest {
 protected:
  void SetUp() override {
    std::ofstream(clock_, std::ios::binary) << std::string(sizeof(int64_t), '\0');
    SetAhead(absl::Hours(1));
    setenv("EMBERD_CLOCK", clock_.c_str(), /*overwrite=*/1);
    ASSERT_NO_FATAL_FAILURE(Start({}, /*every_seconds=*/1));
  }
  void TearDown() override {
    RecoveryTest::TearDown();
    unsetenv("EMBERD_CLOCK");
  }
  // In place: processes have mapped it.
  void SetAhead(absl::Duration ahead) {
    const int64_t nanoseconds = absl::ToInt64Nanoseconds(ahead);
    std::fstream(clock_, std::ios::in | std::ios::out | std::ios::binary)
        .write(reinterpret_cast<const char*>(&nanoseconds), sizeof(nanoseconds));
  }
  bool AwaitSaved(int64_t changes) {
    return Eventually([&] {
      const auto list = List();
      return !list.empty() && list[0].changes >= changes;
    });
  }

  const TempDir folder_ = *TempDir::Create();
  const std::string clock_ = folder_.Path("clock");
};

// By their dates, what is saved from then on would be older than all that is there.
TEST_F(ClockTest, AClockThatIsSetBackKeepsNobodyFromSavingAndRestoringTheNewest) {
  Train(0);
  ASSERT_TRUE(AwaitSaved(1));
  SetAhead(absl::ZeroDuration());
  Train(1);
  const std::string saved = TableDigest();
  ASSERT_TRUE(AwaitSaved(2));
  KillAll();
  EXPECT_EQ(AwaitTables(), saved);
}

// Would catch: limits that an operator has set, and that go with shard 0, which keeps them, though
// the rows come back.
TEST_F(RecoveryTest, LimitsThatWereSetComeBackWithTheRowsOfShardZero) {
  constexpr int kLimit = 500;
  const auto limits = [&](int coordinator) {
    v1::GetLimitsRequest request;
    request.set_model("mixed");
    v1::GetLimitsResponse response;
    const grpc::Status status = Call(&v1::AdminService::Stub::GetLimits,
                                     Api(cluster_->address(coordinator)), request, &response);
    return status.ok() && response.stacks_size() > 0 ? response.stacks(0) : v1::StackLimits();
  };
  v1::SetLimitsRequest set;
  set.set_model("mixed");
  set.add_limits()->set_stack(limits(0).stack());
  set.mutable_limits(0)->set_max_unique_ids_per_partition(kLimit);
  v1::SetLimitsResponse done;
  const grpc::Status status =
      Call(&v1::AdminService::Stub::SetLimits, Api(cluster_->address(0)), set, &done);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const auto all_know = [&] {
    return limits(0).max_unique_ids_per_partition() == kLimit &&
           limits(1).max_unique_ids_per_partition() == kLimit;
  };
  ASSERT_TRUE(Eventually(all_know));
  LoseShard(0);
  EXPECT_EQ(AwaitTables(), initial_);
  EXPECT_TRUE(Eventually(all_know));
}

TEST_F(RecoveryTest, ModelsComeBackThatNobodyDeclaresAgain) {
  Train(0);
  const std::string saved = TableDigest();
  Save("mine");
  KillAll();
  EXPECT_EQ(AwaitTables(), saved);
}

// Nothing was saved since the declaration: what SIGTERM finds is saved before the processes end.
TEST_F(RecoveryTest, ACleanStopLosesNothing) {
  constexpr int kSteps = 3;
  auto stream = client_->Train(model_, {.group = "run", .rank = 0, .size = 1});
  ASSERT_TRUE(stream.ok()) << stream.status();
  for (int step = 0; step < kSteps; ++step) {
    const auto batch = MixedBatch(step, 32);
    ASSERT_TRUE((*stream)->SendLookup(step, Features(batch)).ok());
    const auto found = (*stream)->ReceiveLookup();
    ASSERT_TRUE(found.ok()) << found.status();
    std::vector<client::FeatureGradient> gradients;
    for (const client::Activation& activation : found->activations) {
      gradients.push_back({activation.feature, activation.values, activation.samples});
    }
    ASSERT_TRUE((*stream)->SendUpdate(step, gradients).ok());
    ASSERT_TRUE((*stream)->ReceiveUpdate().ok());
  }
  Train(kSteps);
  const std::string answered = TableDigest();
  ASSERT_NE(answered, initial_);
  stream->reset();
  const absl::Status stopped = cluster_->Stop(absl::Minutes(3));
  ASSERT_TRUE(stopped.ok()) << stopped;
  EXPECT_THAT(cluster_->CoordinatorLog(0) + cluster_->CoordinatorLog(1),
              HasSubstr("a model was saved before the stop"));

  for (const int i : {0, 1}) ASSERT_TRUE(cluster_->RestartShard(i).ok());
  for (const int i : {0, 1}) ASSERT_TRUE(cluster_->RestartCoordinator(i).ok());
  EXPECT_EQ(AwaitTables(), answered);
  stream = client_->Train(model_, {.group = "run", .rank = 0, .size = 1});
  ASSERT_TRUE(stream.ok()) << stream.status();
  EXPECT_EQ((*stream)->next_step(), kSteps);
}

// Would catch: a coordinator that waits for silent shards when it gives up a save, until it is cut
// off, or that takes a model for unchanged of which it hears nothing: nobody hears then which
// models lack their newest changes.
TEST_F(RecoveryTest, AStopWithASilentShardNamesEveryModelThatIsNotSaved) {
  StopWithSilentShards({1});
}
TEST_F(RecoveryTest, AStopWithSilentShardsAloneNamesEveryModelToo) { StopWithSilentShards({0, 1}); }

}  // namespace recovery_test
}  // namespace emberd::testing
