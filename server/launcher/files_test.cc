#include "server/launcher/files.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "base/temp_dir.h"

namespace emberd::launcher {
namespace files_test {

class FilesTest : public ::testing::Test {
 protected:
  const TempDir directory_ = TempDir::Create().value();
};

TEST_F(FilesTest, ReadyFileRoundTrips) {
  const std::string path = directory_.path() + "/ready";
  EXPECT_EQ(ReadReadyFile(path).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(WriteReadyFile(path, {.grpc = "127.0.0.1:5", .http = "", .pid = 7}).ok());
  ASSERT_TRUE(WriteReadyFile(path, {.grpc = "[::1]:5", .http = "h:6", .pid = 8}).ok());
  const auto info = ReadReadyFile(path);
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->grpc, "[::1]:5");
  EXPECT_EQ(info->http, "h:6");
  EXPECT_EQ(info->pid, 8);
  // Nothing else is left behind.
  const auto entries = std::filesystem::directory_iterator(directory_.path());
  EXPECT_EQ(std::distance(begin(entries), end(entries)), 1);
}

TEST_F(FilesTest, WhatIsNoReadyFileIsRefused) {
  const std::string path = directory_.path() + "/ready";
  for (const char* content :
       {"", "grpc=a:1\n", "grpc=a:1\npid=x\n", "pid=4\n", "grpc a:1\npid 4"}) {
    std::ofstream(path) << content;
    EXPECT_EQ(ReadReadyFile(path).status().code(), absl::StatusCode::kInvalidArgument) << content;
  }
}

TEST_F(FilesTest, AFileThatCannotBeWrittenIsNamed) {
  const std::string path = directory_.path() + "/no/such/ready";
  const absl::Status status = WriteReadyFile(path, {.grpc = "a:1", .http = "", .pid = 1});
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(path));
}

// Would catch: a process that its service manager does not start again (exit status 2), though its
// configuration is right and its disk was only not to be had for a moment.
TEST_F(FilesTest, OnlyAWrongPathIsAWrongConfiguration) {
  v1::ClusterConfig cluster;
  cluster.add_shards();
  cluster.mutable_storage()->set_durability(v1::StorageConfig::MEMORY);
  cluster.mutable_storage()->set_directory("/dev/null/data");
  EXPECT_EQ(CheckStorage(cluster, 0).code(), absl::StatusCode::kInvalidArgument);
  cluster.mutable_storage()->set_directory(directory_.path());
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none = {.rlim_cur = 0, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status status = CheckStorage(cluster, 0);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()),
              ::testing::HasSubstr(directory_.path() + " is no folder that emberd can write to"));
  EXPECT_TRUE(CheckStorage(cluster, 0).ok());
}

// `emberd up` ends the move; a shard would begin an empty log, or read one that no longer counts.
TEST_F(FilesTest, AShardDoesNotBeginInTheMiddleOfAMove) {
  v1::ClusterConfig cluster;
  cluster.add_shards();
  cluster.mutable_storage()->set_directory(directory_.path());
  cluster.mutable_storage()->set_checkpoints(directory_.Path("checkpoints"));
  cluster.mutable_storage()->set_durability(v1::StorageConfig::LOG);
  EXPECT_TRUE(CheckStorage(cluster, 0).ok());
  std::ofstream(directory_.Path("moving")) << "shards 2\npartitions 2\n";
  EXPECT_TRUE(CheckStorage(cluster).ok());
  const absl::Status status = CheckStorage(cluster, 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(directory_.Path("moving")));
}

// Would catch: changes that only a log has are missing without a word, because --durability was
// forgotten.
TEST_F(FilesTest, CheckpointsDoNotTakeThePlaceOfLogs) {
  v1::ClusterConfig cluster;
  cluster.add_shards();
  v1::StorageConfig& storage = *cluster.mutable_storage();
  storage.set_directory(directory_.path());
  storage.set_checkpoints(directory_.Path("checkpoints"));
  storage.set_durability(v1::StorageConfig::CHECKPOINT);
  EXPECT_TRUE(CheckStorage(cluster).ok());
  EXPECT_TRUE(CheckStorage(cluster, 0).ok());
  const std::string log = directory_.Path("shard-0000/log");
  ASSERT_TRUE(std::filesystem::create_directories(log));
  for (const absl::Status& status : {CheckStorage(cluster), CheckStorage(cluster, 0)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(log));
  }
  for (const auto durability : {v1::StorageConfig::LOG, v1::StorageConfig::MEMORY}) {
    storage.set_durability(durability);
    EXPECT_TRUE(CheckStorage(cluster, 0).ok());
  }
  // Logs may also be where a move has put them.
  std::filesystem::remove_all(directory_.Path("shard-0000"));
  std::ofstream(directory_.Path("moving")) << "shards 2\npartitions 2\n";
  storage.set_durability(v1::StorageConfig::CHECKPOINT);
  EXPECT_EQ(CheckStorage(cluster).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace files_test
}  // namespace emberd::launcher
