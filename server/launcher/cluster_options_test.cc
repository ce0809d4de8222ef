#include "server/launcher/cluster_options.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/temp_dir.h"
#include "server/launcher/files.h"
#include "server/launcher/up.h"

namespace emberd::launcher {
namespace cluster_options_test {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST(MakeLocalClusterTest, FillsInWhatNobodySaid) {
  const auto cluster = MakeLocalCluster({.shards = 4, .sparsecores_per_shard = 2}, {});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  ASSERT_EQ(cluster->shards_size(), 4);
  EXPECT_EQ(cluster->shards(3).address(), "127.0.0.1:0");
  EXPECT_EQ(cluster->shards(3).http_address(), "127.0.0.1:0");
  ASSERT_EQ(cluster->coordinators_size(), 1);
  EXPECT_EQ(cluster->coordinators(0).address(), "127.0.0.1:7400");
  EXPECT_EQ(cluster->coordinators(0).http_address(), "127.0.0.1:7401");
  EXPECT_GE(cluster->shard_threads(), 1);
  EXPECT_GT(cluster->timeouts().drain_ms(), 0);
}

TEST(MakeLocalClusterTest, TakesFlags) {
  Overrides overrides;
  overrides.address = "[::1]:0";
  overrides.http_address = "127.0.0.1:5";
  overrides.threads = 3;
  overrides.log_level = v1::LoggingConfig::ERROR;
  overrides.log_format = v1::LoggingConfig::JSON;
  overrides.log_file = "log";
  overrides.span_file = "spans";
  const auto cluster = MakeLocalCluster({.shards = 2}, overrides);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EXPECT_EQ(cluster->coordinators(0).address(), "[::1]:0");
  EXPECT_EQ(cluster->coordinators(0).http_address(), "127.0.0.1:5");
  EXPECT_EQ(cluster->shards(0).address(), "127.0.0.1:0");
  EXPECT_EQ(cluster->shard_threads(), 3);
  EXPECT_EQ(cluster->coordinator_threads(), 3);
  EXPECT_EQ(cluster->logging().level(), v1::LoggingConfig::ERROR);
  EXPECT_EQ(cluster->logging().format(), v1::LoggingConfig::JSON);
  EXPECT_EQ(cluster->logging().file(), "log");
  EXPECT_EQ(cluster->logging().span_file(), "spans");
}

// The flags are for the first; two processes cannot have one port.
TEST(MakeLocalClusterTest, FurtherCoordinatorsTakeFreePorts) {
  const auto cluster = MakeLocalCluster({.shards = 2, .coordinators = 3}, {});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  ASSERT_EQ(cluster->coordinators_size(), 3);
  EXPECT_EQ(cluster->coordinators(0).address(), "127.0.0.1:7400");
  for (int i = 1; i < 3; ++i) {
    EXPECT_EQ(cluster->coordinators(i).address(), "127.0.0.1:0");
    EXPECT_EQ(cluster->coordinators(i).http_address(), "127.0.0.1:0");
  }
}

TEST(MakeLocalClusterTest, WithoutHttpNoProcessHasIt) {
  Overrides overrides;
  overrides.http_address = "";
  const auto cluster = MakeLocalCluster({.shards = 2, .coordinators = 2}, overrides);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EXPECT_EQ(cluster->coordinators(0).http_address(), "");
  EXPECT_EQ(cluster->coordinators(1).http_address(), "");
  EXPECT_EQ(cluster->shards(0).http_address(), "");
}

TEST(MakeLocalClusterTest, WithDataThereAreCheckpoints) {
  EXPECT_FALSE(MakeLocalCluster({}, {})->has_storage());
  Overrides overrides;
  overrides.data = "some/../data";
  const auto cluster = MakeLocalCluster({}, overrides);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const std::string directory = std::filesystem::current_path().string() + "/data";
  EXPECT_EQ(cluster->storage().directory(), directory);
  EXPECT_EQ(cluster->storage().checkpoints(), directory + "/checkpoints");
  EXPECT_EQ(cluster->storage().durability(), v1::StorageConfig::CHECKPOINT);
  overrides.data = "/data/";
  overrides.durability = v1::StorageConfig::MEMORY;
  const auto memory = MakeLocalCluster({}, overrides);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->storage().checkpoints(), "/data/checkpoints");
  EXPECT_EQ(memory->storage().durability(), v1::StorageConfig::MEMORY);
}

TEST(MakeLocalClusterTest, DurabilityNeedsAFolder) {
  Overrides overrides;
  overrides.durability = v1::StorageConfig::CHECKPOINT;
  EXPECT_THAT(std::string(MakeLocalCluster({}, overrides).status().message()),
              StartsWith("--durability: there is no folder to write to; name one with --data DIR"));
}

class LoadClusterForTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = directory_.path() + "/cluster.textproto";
    std::ofstream(path_) << "shards { address: 'a:1' http_address: 'a:2' }\n"
                            "shards { address: 'b:1' http_address: 'b:2' }\n"
                            "coordinators { address: 'c:1' http_address: 'c:2' }\n"
                            "shard_threads: 5 logging { level: WARNING }\n";
  }
  const TempDir directory_ = TempDir::Create().value();
  std::string path_;
};

TEST_F(LoadClusterForTest, FlagsChangeTheProcessStartedAndNoOther) {
  Overrides overrides;
  overrides.address = "x:1";
  overrides.http_address = "";
  const auto shard = LoadClusterFor(path_, Role::kShard, 1, overrides);
  ASSERT_TRUE(shard.ok()) << shard.status();
  EXPECT_EQ(shard->shards(0).address(), "a:1");
  EXPECT_EQ(shard->shards(1).address(), "x:1");
  EXPECT_EQ(shard->shards(1).http_address(), "");
  EXPECT_EQ(shard->coordinators(0).address(), "c:1");
  const auto coordinator = LoadClusterFor(path_, Role::kCoordinator, 0, overrides);
  ASSERT_TRUE(coordinator.ok()) << coordinator.status();
  EXPECT_EQ(coordinator->coordinators(0).address(), "x:1");
  EXPECT_EQ(coordinator->shards(1).address(), "b:1");
}

TEST_F(LoadClusterForTest, WithoutFlagsTheFileStands) {
  const auto cluster = LoadClusterFor(path_, Role::kShard, 0, {});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EXPECT_EQ(cluster->shards(0).http_address(), "a:2");
  EXPECT_EQ(cluster->shard_threads(), 5);
  EXPECT_EQ(cluster->logging().level(), v1::LoggingConfig::WARNING);
}

TEST_F(LoadClusterForTest, FlagsAreCheckedLikeTheFile) {
  Overrides overrides;
  overrides.address = "b:1";
  const absl::Status status = LoadClusterFor(path_, Role::kShard, 0, overrides).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("shards[1].address"));
}

TEST_F(LoadClusterForTest, DataReplacesTheFolderAndNothingElseOfStorage) {
  std::ofstream(path_, std::ios::app)
      << "storage { directory: '/a' checkpoints: '/b' max_chain: 7 }";
  Overrides overrides;
  overrides.data = "/c";
  const auto cluster = LoadClusterFor(path_, Role::kCoordinator, 0, overrides);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EXPECT_EQ(cluster->storage().directory(), "/c");
  EXPECT_EQ(cluster->storage().checkpoints(), "/c/checkpoints");
  EXPECT_EQ(cluster->storage().max_chain(), 7);
  EXPECT_EQ(cluster->storage().durability(), v1::StorageConfig::MEMORY);
  overrides.data.reset();
  overrides.durability = v1::StorageConfig::CHECKPOINT;
  const auto durable = LoadClusterFor(path_, Role::kCoordinator, 0, overrides);
  ASSERT_TRUE(durable.ok()) << durable.status();
  EXPECT_EQ(durable->storage().checkpoints(), "/b");
  EXPECT_EQ(durable->storage().durability(), v1::StorageConfig::CHECKPOINT);
}

// Would catch: a file that is checked before the flags which say what it is for.
TEST_F(LoadClusterForTest, TheDurabilityOfTheFlagDecidesWhatTheFileMayHave) {
  std::ofstream(path_, std::ios::app) << "storage { every_steps: 7 }";
  Overrides overrides;
  overrides.data = "/c";
  EXPECT_EQ(LoadClusterFor(path_, Role::kCoordinator, 0, overrides).status().message(),
            path_ +
                ": storage.every_steps: 7 would be ignored with durability MEMORY; remove it, or "
                "write durability: CHECKPOINT");
  overrides.durability = v1::StorageConfig::CHECKPOINT;
  const auto durable = LoadClusterFor(path_, Role::kCoordinator, 0, overrides);
  ASSERT_TRUE(durable.ok()) << durable.status();
  EXPECT_EQ(durable->storage().directory(), "/c");
  EXPECT_EQ(durable->storage().every_steps(), 7);
}

// Would catch: processes with different budgets, of which some listen on other addresses than the
// file has.
TEST_F(LoadClusterForTest, AnotherAddressLeavesTheBudgets) {
  std::ofstream(path_) << "shards { address: 'a:1' } shards { address: 'a:2' }";
  Overrides overrides;
  overrides.address = "0.0.0.0:1";
  const auto there = LoadClusterFor(path_, Role::kShard, 1, {});
  const auto elsewhere = LoadClusterFor(path_, Role::kShard, 0, overrides);
  ASSERT_TRUE(there.ok() && elsewhere.ok()) << elsewhere.status();
  EXPECT_EQ(elsewhere->shards(0).address(), "0.0.0.0:1");
  EXPECT_EQ(elsewhere->budgets().bytes_per_sparsecore(), there->budgets().bytes_per_sparsecore());
}

TEST_F(LoadClusterForTest, IndexOutOfRange) {
  for (const auto& [role, index] : {std::pair(Role::kShard, 2), std::pair(Role::kShard, -1),
                                    std::pair(Role::kCoordinator, 1)}) {
    const absl::Status status = LoadClusterFor(path_, role, index, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), StartsWith("--index: " + std::to_string(index)));
  }
}

// As `emberd up` says it, too, which has no --index.
TEST_F(LoadClusterForTest, NothingToIndex) {
  std::ofstream(path_) << "shards { address: 'a:1' }";
  const absl::Status status = LoadClusterFor(path_, Role::kCoordinator, 0, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              StartsWith("coordinators: the configuration lists none; add at least one"));
}

TEST(ReadyTextTest, LineIsForScripts) {
  ClusterInfo info;
  info.cluster.add_shards();
  info.cluster.add_shards();
  info.cluster.set_sparsecores_per_shard(4);
  info.coordinators = {{.grpc = "h:1", .http = "h:2", .pid = 3}};
  EXPECT_EQ(ReadyLine(info), "emberd: ready coordinator=h:1 http=h:2 shards=2 pids=3");
  EXPECT_THAT(Banner(info), HasSubstr("2 shards with 4 SparseCores each, all in this process\n"));
  info.shards = {{.grpc = "h:4", .http = "", .pid = 5}, {.grpc = "h:6", .http = "h:7", .pid = 8}};
  EXPECT_EQ(ReadyLine(info),
            "emberd: ready coordinator=h:1 http=h:2 shards=2 pids=3,5,8 shard_grpc=h:4,h:6 "
            "shard_http=,h:7");
  EXPECT_THAT(Banner(info), HasSubstr("one process each\n"));
  EXPECT_THAT(Banner(info), HasSubstr("http://h:2/\n"));  // the status page
  EXPECT_THAT(Banner(info), HasSubstr("http://h:7/metrics\n"));
  EXPECT_THAT(Banner(info), Not(HasSubstr("checkpoints")));
  info.cluster.mutable_storage()->set_checkpoints("/data/checkpoints");
  EXPECT_THAT(Banner(info), HasSubstr("  checkpoints    /data/checkpoints\n"));
}

}  // namespace cluster_options_test
}  // namespace emberd::launcher
