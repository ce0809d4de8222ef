// Shards that are killed while the disk of evicted rows is full, and find it full when they read
// their logs: they wait for room, say for what they wait, and go on by themselves when it is there.
// Catches: a full disk that is taken for a damaged log, so that somebody has to start the shards
// again.
#include <filesystem>
#include <string>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/chaos/small_disk.h"
#include "tests/fault/eviction_cluster.h"

namespace emberd::testing {
namespace spill_disk_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

class SpillDiskTest : public EvictionCluster {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(disk_);
    if (!chaos::MountDisk(disk_)) {
      GTEST_SKIP() << "no file system of its own can be mounted here";
    }
    mounted_ = true;
    EvictionCluster::SetUp();
  }
  void TearDown() override {
    if (mounted_) chaos::UnmountDisk(disk_);
  }
  void Fill() { chaos::Fill(filler_); }

  const std::string disk_ = folder_.Path("spill");
  const std::string filler_ = folder_.Path("spill/filler");
  bool mounted_ = false;
};

TEST_F(SpillDiskTest, ShardsThatComeBackToAFullDiskWaitForRoom) {
  Trained two = StartFor(2, "", Log());
  ASSERT_TRUE(two.Declare(kModels).ok());
  for (int step = 0; step < 2; ++step) ASSERT_NO_FATAL_FAILURE(TrainBoth(two, step, {0, 1, 2}));
  Fill();
  for (int shard = 0; shard < kShards; ++shard) two.cluster->KillShard(shard);
  Fill();  // what the shards had spilled went with them
  for (int shard = 0; shard < kShards; ++shard) {
    ASSERT_TRUE(two.cluster->RestartShard(shard).ok());
  }
  const absl::Status waits = Await([&] { return two.Step(0, 2); },
                                   [](const absl::Status& status) {
                                     EXPECT_TRUE(absl::IsUnavailable(status)) << status;
                                     return !absl::IsUnavailable(status) ||
                                            absl::StrContains(status.message(), "spilled to");
                                   });
  EXPECT_THAT(std::string(waits.message()), AllOf(HasSubstr("recovering"), HasSubstr(disk_)));
  std::filesystem::remove(filler_);
  ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 2, {0, 1, 2}));
  ExpectRightTables(two, {0, 1, 2});
}

}  // namespace spill_disk_test
}  // namespace emberd::testing
