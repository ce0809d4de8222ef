// A table of 20 GB of which hardly a row was ever touched: a checkpoint takes the bytes, and a save
// and a restore the memory and the time, of the rows that were. Whoever goes through all rows, or
// writes the untouched ones, makes this test slow, and the files and the processes large.
#include <cstdint>
#include <fstream>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/temp_dir.h"
#include "base/testing/seed.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"

namespace emberd::testing {
namespace checkpoint_large_test {

using ::testing::ElementsAreArray;

constexpr int64_t kRows = 80'000'000;
constexpr int kWidth = 64, kTouched = 1000, kShards = 2;
constexpr int64_t kChunkBytes = 4096;
constexpr int64_t kMostMemory = int64_t{512} << 20;  // of a shard, for all that it is

constexpr char kConfig[] = R"(name: "large"
    optimizer { adagrad {} learning_rate: 0.1 }
    tables { name: "t" vocabulary_size: 80000000 embedding_dim: 64
             initializer { uniform { lower: -1 upper: 1 } } }
    features { name: "f" table: "t" })";

// The most that the process has ever had in memory.
int64_t PeakBytes(pid_t pid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);) {
    if (!absl::StartsWith(line, "VmHWM:")) continue;
    const std::vector<std::string> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    int64_t kilobytes = 0;
    if (words.size() > 1 && absl::SimpleAtoi(words[1], &kilobytes)) return kilobytes * 1024;
  }
  ADD_FAILURE() << "no memory of process " << pid;
  return 0;
}

TEST(CheckpointLargeTest, CostsWhatWasTouched) {
  const TempDir storage = *TempDir::Create();
  auto cluster = Cluster::Start(
      {.shards = kShards,
       .config = absl::StrCat("storage { directory: \"", storage.path(),
                              "\" } budgets { bytes_per_sparsecore: ", int64_t{1} << 36, " }")});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const auto client = (*cluster)->Connect();
  auto model = client->DeclareModel(kConfig);
  ASSERT_TRUE(model.ok()) << model.status();

  std::mt19937_64 random(TestSeed());
  std::set<int64_t> distinct;
  while (distinct.size() < kTouched) distinct.insert(static_cast<int64_t>(random() % kRows));
  const std::vector<int64_t> ids(distinct.begin(), distinct.end());
  std::vector<float> values(ids.size() * kWidth);
  for (float& value : values) value = static_cast<float>(random() % 1000);
  ASSERT_TRUE(client->AssignRows(*model, "t", ids, values).ok());

  const auto saved = client->SaveCheckpoint("large", {.name = "few"});
  ASSERT_TRUE(saved.ok()) << saved.status();
  const int64_t touched = 2 * kTouched * kChunkBytes;  // with Adagrad's slot
  EXPECT_GT(saved->checkpoint.bytes, touched / 10);
  EXPECT_LT(saved->checkpoint.bytes, touched * 11 / 10 + kShards * (256 << 10));

  ASSERT_TRUE(client->DropModel("large").ok());
  const auto restored = client->RestoreCheckpoint("large");
  ASSERT_TRUE(restored.ok()) << restored.status();
  model = client->DescribeModel("large");
  ASSERT_TRUE(model.ok()) << model.status();
  const auto rows = client->ReadRows(*model, "t", ids);
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_THAT(rows->values, ElementsAreArray(values));

  // And of what has changed since.
  ASSERT_TRUE(client->AssignRows(*model, "t", {ids[0]}, std::vector<float>(kWidth, 7)).ok());
  const auto changes = client->SaveCheckpoint("large", {.name = "one", .incremental = true});
  ASSERT_TRUE(changes.ok()) << changes.status();
  EXPECT_EQ(changes->checkpoint.parent, "few");
  EXPECT_LT(changes->checkpoint.bytes, 64 << 10);

  for (int shard = 0; shard < kShards; ++shard) {
    EXPECT_LT(PeakBytes((*cluster)->shard_process(shard)->pid()), kMostMemory);
  }
}

}  // namespace checkpoint_large_test
}  // namespace emberd::testing
