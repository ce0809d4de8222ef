// Evicted rows that somebody damages on disk. They are noticed when their model is used: its calls
// end with DATA_LOSS and the name of the file, nobody gets wrong rows, and the shard and its other
// models go on. Catches: rows that are served as they were read; a shard that ends; a client that
// is told to try again for ever; rows that cannot be brought back.
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/file_descriptor.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shard/testing/spilled_files.h"
#include "tests/fault/eviction_cluster.h"

namespace emberd::testing {
namespace spill_damage_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

enum class Damage { kFlippedByte, kCutFile };

void Spoil(const shard::testing::SpilledFile& file, Damage damage) {
  const FileDescriptor open_file = file.Open();
  ASSERT_GE(open_file.get(), 0) << file.path;
  struct stat size;
  ASSERT_EQ(fstat(open_file.get(), &size), 0);
  ASSERT_GT(size.st_size, 1);
  const off_t middle = size.st_size / 2;
  if (damage == Damage::kCutFile) {
    ASSERT_EQ(ftruncate(open_file.get(), middle), 0);
    return;
  }
  char byte = 0;
  ASSERT_EQ(pread(open_file.get(), &byte, 1, middle), 1);
  byte = static_cast<char>(byte ^ 0x10);
  ASSERT_EQ(pwrite(open_file.get(), &byte, 1, middle), 1);
}

class SpillDamageTest : public EvictionCluster {
 protected:
  // Models get a first checkpoint by themselves, which brings them in.
  static void AwaitCheckpoints(Trained& cluster) {
    for (int model = 0; model < kModels; ++model) {
      EXPECT_TRUE(Eventually([&] {
        const auto list = cluster.client->ListCheckpoints(EvictedName(model));
        return list.ok() && !list->checkpoints.empty();
      }));
    }
  }
  // Damages what shard 1 has spilled of the first model, the only one that is not in memory, and
  // returns the name of the file.
  std::string SpoilFirstModel(Trained& cluster, Damage damage) {
    const auto files =
        shard::testing::SpilledFiles(absl::StrCat(cluster.cluster->shard_process(1)->pid()));
    EXPECT_EQ(files.size(), 1u);
    if (files.empty()) return "none";
    Spoil(files[0], damage);
    return files[0].name;
  }
  static void ExpectLost(const absl::Status& status, const std::string& file,
                         const std::string& why) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("model 'mixed-0' is lost: shard 1"),
                                                     HasSubstr(file), HasSubstr(why)));
  }
};

TEST_F(SpillDamageTest, OnlyTheModelIsLostAndCanBeReset) {
  for (const auto& [damage, why] :
       {std::pair(Damage::kFlippedByte, "their checksum has changed"),
        std::pair(Damage::kCutFile, "cannot be read: the file ends after ")}) {
    Trained two = StartFor(2);
    ASSERT_TRUE(two.Declare(kModels).ok());
    ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 0, {0, 1, 2}));
    const uint64_t life = ShardStatusOf(*two.cluster, 1).incarnation();
    const std::string file = SpoilFirstModel(two, damage);
    ExpectLost(two.Step(0, 1), file, why);
    ExpectLost(two.Step(0, 1), file, why);
    ExpectLost(Digest(*two.client, two.models[0]).status(), file, why);
    // The others go on, also through files of their own.
    ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 1, {1, 2}));
    ExpectRightTables(two, {1, 2});
    ExpectLost(two.Step(0, 1), file, why);
    EXPECT_EQ(ShardStatusOf(*two.cluster, 1).incarnation(), life);
    for (Trained* cluster : {&two, calm_.get()}) {
      EXPECT_TRUE(cluster->client->ResetModel(EvictedName(0)).ok());
    }
    ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 2, {0, 1, 2}));
    ExpectRightTables(two, {0, 1, 2});
    // The next round begins like this one.
    for (int model = 0; model < kModels; ++model) {
      EXPECT_TRUE(calm_->client->ResetModel(EvictedName(model)).ok());
    }
  }
}

TEST_F(SpillDamageTest, AShardThatStartsAgainHasTheRowsFromItsLog) {
  Trained two = StartFor(2, "", Log());
  ASSERT_TRUE(two.Declare(kModels).ok());
  AwaitCheckpoints(two);
  ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 0, {0, 1, 2}));
  const std::string file = SpoilFirstModel(two, Damage::kFlippedByte);
  ExpectLost(two.Step(0, 1), file, "with storage.durability LOG, a shard that is started again");
  two.cluster->KillShard(1);
  ASSERT_TRUE(two.cluster->RestartShard(1).ok());
  ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 1, {0, 1, 2}));
  ExpectRightTables(two, {0, 1, 2});
}

TEST_F(SpillDamageTest, WithCheckpointsTheModelGoesBackByItself) {
  Trained two = StartFor(
      2, "",
      absl::StrCat("storage { directory: \"", folder_.path(), "/data\" durability: CHECKPOINT }"));
  ASSERT_TRUE(two.Declare(kModels).ok());
  AwaitCheckpoints(two);
  ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 0, {0, 1, 2}));
  ASSERT_TRUE(two.client->SaveCheckpoint(EvictedName(0)).ok());
  ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 1, {1, 2}));
  SpoilFirstModel(two, Damage::kCutFile);
  ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 2, {0, 1, 2}));
  ExpectRightTables(two, {0, 1, 2});
}

// The files themselves cannot be taken away, for they are in no folder.
TEST_F(SpillDamageTest, AFolderThatIsTakenAwayStopsEvictionsAlone) {
  Trained two = StartFor(2);
  ASSERT_TRUE(two.Declare(kModels).ok());
  ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 0, {0, 1, 2}));
  const std::string spill = folder_.path() + "/spill";
  EXPECT_THAT(std::vector<std::filesystem::path>(std::filesystem::directory_iterator(spill),
                                                 std::filesystem::directory_iterator()),
              IsEmpty());
  std::filesystem::remove(spill);
  const absl::Status refused = two.Step(0, 1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("eviction.spill_folder"), HasSubstr(spill)));
  ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 1, {1, 2}));
  std::filesystem::create_directory(spill);
  ASSERT_NO_FATAL_FAILURE(TrainBoth(two, 1, {0}));
  ExpectRightTables(two, {0, 1, 2});
}

}  // namespace spill_damage_test
}  // namespace emberd::testing
