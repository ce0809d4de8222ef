// The disk of the logs is full: what cannot be logged is refused and changes nothing, lookups go
// on, also at shards that die then, and with room there all goes on by itself, with the tables of a
// cluster that nobody disturbed. Catches: an update that is half there, or there
// although it was refused, a shard that has to be started again, and a log that cannot be read
// afterwards. Covers: ../chaos/small_disk.cc
#include <filesystem>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gtest/gtest.h"
#include "tests/chaos/small_disk.h"
#include "tests/fault/eviction_cluster.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace log_disk_test {

constexpr int kShards = 2;
constexpr int64_t kSamples = 4096;

class LogDiskTest : public ClusterFixture {
 protected:
  void SetUp() override {
    if (!chaos::MountDisk(disk_.path())) {
      GTEST_SKIP() << "no file system of its own can be mounted here";
    }
    mounted_ = true;
    StartCluster(
        {.shards = kShards,
         .config = absl::StrCat("storage { directory: \"", disk_.path(), "\" durability: LOG }")},
        MixedModel("mixed"));
  }
  void TearDown() override {
    cluster_.reset();
    if (mounted_) chaos::UnmountDisk(disk_.path());
  }

  absl::Status Train() {
    const absl::Status status = TrainStep(*client_, model_, steps_, kSamples);
    steps_ += status.ok() ? 1 : 0;
    return status;
  }
  void AwaitTrain() {
    const absl::Status status = Await([&] { return Train(); });
    ASSERT_TRUE(status.ok()) << status;
  }
  void Fill() { chaos::Fill(disk_.Path("filler")); }
  void MakeRoom() { std::filesystem::remove(disk_.Path("filler")); }
  // What is refused says why, and leaves no trace; lookups go on.
  void TrainUntilRefused() {
    for (int i = 0; i < 1000; ++i) {
      const std::string before = TableDigest();
      const absl::Status status = Train();
      if (status.ok()) continue;
      EXPECT_TRUE(absl::IsResourceExhausted(status) || absl::IsUnavailable(status)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "is full")) << status;
      EXPECT_EQ(TableDigest(), before);
      return;
    }
    FAIL() << "the disk is not full";
  }
  // However often something was refused in between.
  void ExpectOneLineAtEachEnd() {
    int begins = 0;
    for (int shard = 0; shard < kShards; ++shard) {
      const std::string folder = disk_.Path(absl::StrCat("shard-000", shard, "/log"));
      int begun = 0;
      int ended = 0;
      for (const absl::string_view line : absl::StrSplit(cluster_->ShardLog(shard), '\n')) {
        if (!absl::StrContains(line, folder)) continue;
        begun +=
            absl::StrContains(line, " W ") && absl::StrContains(line, "refuses updates") ? 1 : 0;
        ended += absl::StrContains(line, " W ") && absl::StrContains(line, " seconds=") ? 1 : 0;
      }
      EXPECT_LE(begun, 1) << cluster_->ShardLog(shard);
      EXPECT_EQ(ended, begun) << cluster_->ShardLog(shard);
      begins += begun;
    }
    EXPECT_GE(begins, 1) << cluster_->ShardLog(0);
  }
  std::string Undisturbed(int steps) {
    auto calm = Cluster::Start({.shards = 1, .sparsecores_per_shard = 4, .embedded = true});
    EXPECT_TRUE(calm.ok()) << calm.status();
    auto client = (*calm)->Connect();
    auto model = client->DeclareModel(MixedModel("mixed"));
    EXPECT_TRUE(model.ok()) << model.status();
    for (int step = 0; step < steps; ++step) {
      EXPECT_TRUE(TrainStep(*client, *model, step, kSamples).ok());
    }
    return Digest(*client, *model).value_or("none");
  }

  const TempDir disk_ = *TempDir::Create();
  bool mounted_ = false;
  int steps_ = 0;
};

TEST_F(LogDiskTest, UpdatesAreRefusedUntilThereIsRoom) {
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Train().ok());
  for (int round = 0; round < 2; ++round) {
    Fill();
    ASSERT_NO_FATAL_FAILURE(TrainUntilRefused());
    ASSERT_NO_FATAL_FAILURE(TrainUntilRefused());
    MakeRoom();
    for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(AwaitTrain());
    if (round == 0) ExpectOneLineAtEachEnd();
  }
  const std::string tables = TableDigest();
  EXPECT_EQ(tables, Undisturbed(steps_));
  for (int i = 0; i < kShards; ++i) cluster_->KillShard(i);
  for (int i = 0; i < kShards; ++i) ASSERT_TRUE(cluster_->RestartShard(i).ok());
  ASSERT_NO_FATAL_FAILURE(AwaitTrain());
  EXPECT_EQ(TableDigest(), Undisturbed(steps_));
}

TEST_F(LogDiskTest, AShardThatComesBackToAFullDiskServesLookups) {
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Train().ok());
  Fill();
  ASSERT_NO_FATAL_FAILURE(TrainUntilRefused());
  const std::string tables = TableDigest();
  cluster_->KillShard(1);
  ASSERT_TRUE(cluster_->RestartShard(1).ok());
  const auto read = Await([&] { return Digest(*client_, model_); });
  EXPECT_EQ(read.value_or("none"), tables);
  // The shard gives room back when it has read its log, and then accepts updates for a while.
  std::string shown;
  EXPECT_TRUE(Eventually([&] {
    Fill();
    TrainUntilRefused();
    shown = Emberctl(*cluster_, {"status"}).text;
    return absl::StrContains(shown, "NO CHANGES") && absl::StrContains(shown, "is full");
  })) << shown;
  MakeRoom();
  for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(AwaitTrain());
  EXPECT_FALSE(absl::StrContains(Emberctl(*cluster_, {"status"}).text, "NO CHANGES"));
  EXPECT_EQ(TableDigest(), Undisturbed(steps_));
  // What was answered since then is in the log.
  for (int i = 0; i < kShards; ++i) cluster_->KillShard(i);
  for (int i = 0; i < kShards; ++i) ASSERT_TRUE(cluster_->RestartShard(i).ok());
  ASSERT_NO_FATAL_FAILURE(AwaitTrain());
  EXPECT_EQ(TableDigest(), Undisturbed(steps_));
}

}  // namespace log_disk_test
}  // namespace emberd::testing
