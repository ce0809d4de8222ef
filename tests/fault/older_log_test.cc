// A loss of power takes the newest records of some shards' logs, and of each as many as its disk
// had not written. Then shards come back that have not made the same updates. Catches: rows of
// which half are older than the others, and served all the same; a retry that is told that its
// update is there; a group that can never join; a loss where there is none.
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/group_training.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace older_log_test {

using ::testing::HasSubstr;

constexpr int kShards = 2;
constexpr int64_t kSamples = 32;

class OlderLogTest : public ClusterFixture {
 protected:
  template <typename Description>
  void Start(const Description& model) {
    StartCluster({.shards = kShards,
                  .sparsecores_per_shard = 4,
                  .config = absl::StrCat("storage { directory: \"", storage_.path(),
                                         "\" durability: LOG fsync: INTERVAL }")},
                 model);
  }
  // Before the folders go that the processes write to.
  void TearDown() override { cluster_.reset(); }
  std::string Folder(int shard) { return storage_.Path(absl::StrCat("shard-000", shard)); }
  std::string Kept(int shard) { return kept_.Path(absl::StrCat("shard-000", shard)); }
  // What the disk of the shard has, while nobody trains: until no file came or went meanwhile, as
  // after a checkpoint.
  void Keep(int shard) {
    std::set<std::string> before;
    do {
      before = Files(shard);
      std::error_code vanished;
      std::filesystem::remove_all(Kept(shard));
      std::filesystem::copy(Folder(shard), Kept(shard), std::filesystem::copy_options::recursive,
                            vanished);
    } while (Files(shard) != before);
  }
  std::set<std::string> Files(int shard) {
    std::set<std::string> files;
    for (const auto& file : std::filesystem::directory_iterator(Folder(shard) + "/log")) {
      files.insert(file.path().filename());
    }
    return files;
  }
  void PutBack(int shard) {
    std::filesystem::remove_all(Folder(shard));
    std::filesystem::copy(Kept(shard), Folder(shard), std::filesystem::copy_options::recursive);
  }
  // Everything ends, and the logs of these shards are as they were kept.
  void LosePower(const std::vector<int>& shards) {
    cluster_->KillCoordinator(0);
    for (int i = 0; i < kShards; ++i) cluster_->KillShard(i);
    for (const int shard : shards) PutBack(shard);
    for (int i = 0; i < kShards; ++i) ASSERT_TRUE(cluster_->RestartShard(i).ok());
    ASSERT_TRUE(cluster_->RestartCoordinator(0).ok());
  }

  // What it ends with when the shards have been compared.
  template <typename Call>
  static absl::Status AtLast(const Call& call) {
    return Await(call, [](const absl::Status& status) { return !absl::IsUnavailable(status); });
  }
  void ExpectLost(const absl::Status& status, const std::string& points) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(points));
    EXPECT_THAT(std::string(status.message()), HasSubstr("emberctl checkpoint restore"));
  }
  void ExpectBack(const std::string& tables) {
    const absl::Status back = AtLast([&] { return Digest(*client_, model_).status(); });
    ASSERT_TRUE(back.ok()) << back;
    EXPECT_EQ(TableDigest(), tables);
  }
  void ExpectSameAfterAllEnd() {
    const std::string tables = TableDigest();
    ASSERT_NO_FATAL_FAILURE(LosePower({}));
    ExpectBack(tables);
  }
  void ExpectOneLine() {
    int lines = 0;
    for (const absl::string_view line : absl::StrSplit(cluster_->CoordinatorLog(0), '\n')) {
      lines += absl::StrContains(line, "a model is lost") ? 1 : 0;
    }
    EXPECT_EQ(lines, 1) << cluster_->CoordinatorLog(0);
  }

  absl::Status Update(uint64_t sequence) {
    const auto batch = MixedBatch(step_, kSamples);
    auto found = client_->Lookup(model_, Features(batch));
    if (!found.ok()) return found.status();
    last_ = *std::move(found);
    return Retry(sequence);
  }
  // Of the last update, whoever may have made it.
  absl::Status Retry(uint64_t sequence) {
    client::ApplyOptions options;
    options.sequence = sequence;
    const auto values = MixedGradients(step_, last_);
    return client_->ApplyGradients(model_, last_.batch, Gradients(last_, values), options).status();
  }
  // Returns the number of the last update.
  uint64_t Train(int steps) {
    uint64_t sequence = 0;
    for (int i = 0; i < steps; ++i) {
      sequence = client_->NextSequence();
      const absl::Status status = AtLast([&] { return Update(sequence); });
      EXPECT_TRUE(status.ok()) << status;
      ++step_;
    }
    return sequence;
  }
  void ExpectUnaryLost(const std::string& points) {
    ExpectLost(AtLast([&] { return Digest(*client_, model_).status(); }), points);
    ExpectLost(Retry(client_->NextSequence()), points);
    ExpectLost(Update(client_->NextSequence()), points);
    ExpectLost(client_->DeclareModel(MixedModel("mixed")).status(), points);
  }

  const TempDir storage_ = *TempDir::Create();
  const TempDir kept_ = *TempDir::Create();
  client::LookupResult last_;
  int step_ = 0;
};

// The shard whose log is older.
class OneOlderLogTest : public OlderLogTest, public ::testing::WithParamInterface<int> {
 protected:
  std::string Points(uint64_t sequence, uint64_t kept) const {
    return absl::StrCat("client '", client_->client_id(), "': shard ", 1 - GetParam(),
                        " has made mutation ", sequence, ", shard ", GetParam(),
                        " has not, and the newest that it knows is ", kept);
  }
};
INSTANTIATE_TEST_SUITE_P(Shards, OneOlderLogTest, ::testing::Values(0, 1));

TEST_P(OneOlderLogTest, UpdatesThatAShardHasLostAreNoticed) {
  Start(MixedModel("mixed"));
  const uint64_t kept = Train(3);
  Keep(GetParam());
  const uint64_t sequence = Train(4);
  ASSERT_NO_FATAL_FAILURE(LosePower({GetParam()}));
  const std::string points = Points(sequence, kept);
  ExpectUnaryLost(points);
  ExpectLost(Retry(sequence), points);
  ExpectOneLine();
  // What the record has of the rows of before is no loss of the rows of now.
  ASSERT_TRUE(client_->ResetModel("mixed").ok());
  Train(2);
  ExpectSameAfterAllEnd();
}

TEST_P(OneOlderLogTest, AShardIsComparedWithThoseThatGoOn) {
  Start(MixedModel("mixed"));
  const uint64_t kept = Train(3);
  Keep(GetParam());
  const uint64_t sequence = Train(4);
  cluster_->KillShard(GetParam());
  PutBack(GetParam());
  ASSERT_TRUE(cluster_->RestartShard(GetParam()).ok());
  ExpectUnaryLost(Points(sequence, kept));
  ExpectOneLine();
}

TEST_F(OlderLogTest, AllShardsMayGoBackTogether) {
  Start(MixedModel("mixed"));
  Train(3);
  for (int i = 0; i < kShards; ++i) Keep(i);
  const std::string tables = TableDigest();
  Train(4);
  ASSERT_NO_FATAL_FAILURE(LosePower({0, 1}));
  ExpectBack(tables);
  Train(1);
}

// Of so many ranks.
class OlderGroupLogTest : public OlderLogTest, public ::testing::WithParamInterface<int> {
 protected:
  absl::Status TrainGroup(int64_t steps) {
    return testing::TrainGroup(*cluster_, model_, {.group = "run", .size = GetParam()}, 1, steps);
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, OlderGroupLogTest, ::testing::Values(1, 2));

TEST_P(OlderGroupLogTest, StepsThatAShardHasLostAreNoticed) {
  Start(GroupModel("m", 0));
  ASSERT_TRUE(TrainGroup(3).ok());
  const auto saved = Await([&] { return client_->SaveCheckpoint("m", {.name = "third"}); });
  ASSERT_TRUE(saved.ok()) << saved.status();
  Keep(1);
  ASSERT_TRUE(TrainGroup(4).ok());
  ASSERT_NO_FATAL_FAILURE(LosePower({1}));
  const std::string points =
      "group 'run': shard 0 has applied the steps before 7, shard 1 those before 3";
  ExpectLost(AtLast([&] { return Digest(*client_, model_).status(); }), points);
  ExpectLost(TrainGroup(1), points);
  ExpectOneLine();
  const auto restored = client_->RestoreCheckpoint("m", {.name = "third"});
  ASSERT_TRUE(restored.ok()) << restored.status();
  const absl::Status trained = TrainGroup(2);
  ASSERT_TRUE(trained.ok()) << trained;
  ExpectSameAfterAllEnd();
}

}  // namespace older_log_test
}  // namespace emberd::testing
