// storage.durability LOG: whatever dies, and at whatever moment, what was answered is there when it
// comes back, with the same bits, and what was not decided is decided once.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/group_training.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace shard_log_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kShards = 2;
constexpr int64_t kSamples = 32;

class LogTest : public ClusterFixture {
 protected:
  // `storage`: more fields of StorageConfig.
  void Start(const std::string& storage = "",
             const std::map<std::string, std::string>& failpoints = {}, int coordinators = 2) {
    StartCluster({.shards = kShards,
                  .coordinators = coordinators,
                  .config = absl::StrCat("storage { directory: \"", storage_.path(),
                                         "\" durability: LOG ", storage, " }"),
                  .failpoints = failpoints},
                 MixedModel("mixed"));
  }
  // It comes by itself, and begins a segment.
  void AwaitFirstCheckpoint() {
    const auto saved = [&] {
      const auto list = client_->ListCheckpoints("mixed");
      return list.ok() && !list->checkpoints.empty();
    };
    EXPECT_TRUE(Eventually(saved));
  }

  // Until it works; no call may say that something is lost.
  template <typename Call>
  auto Await(const Call& call) {
    auto result = emberd::Await([&] {
      auto tried = call();
      EXPECT_NE(StatusOf(tried).code(), absl::StatusCode::kDataLoss) << StatusOf(tried);
      return tried;
    });
    EXPECT_TRUE(result.ok()) << StatusOf(result);
    return result;
  }
  // By shards that have read their logs.
  static bool Answered(const absl::Status& status) { return !absl::IsUnavailable(status); }
  static absl::Status StatusOf(const absl::Status& status) { return status; }
  template <typename T>
  static absl::Status StatusOf(const absl::StatusOr<T>& result) {
    return result.status();
  }

  void Train(int step) {
    ASSERT_TRUE(Await([&] { return TrainStep(*client_, model_, step, kSamples); }).ok());
  }
  std::string Tables() {
    return Await([&] { return Digest(*client_, model_); }).value_or("none");
  }
  void LoseShard(int shard) {
    cluster_->KillShard(shard);
    ASSERT_TRUE(cluster_->RestartShard(shard).ok());
  }
  void KillAll() {
    for (const int i : {0, 1}) cluster_->KillCoordinator(i);
    for (int i = 0; i < kShards; ++i) cluster_->KillShard(i);
    for (int i = 0; i < kShards; ++i) ASSERT_TRUE(cluster_->RestartShard(i).ok());
    for (const int i : {0, 1}) ASSERT_TRUE(cluster_->RestartCoordinator(i).ok());
  }
  // Starts shard 1 again, which serves nothing.
  void ExpectRefusalThatNames(const std::string& file) {
    ASSERT_TRUE(cluster_->RestartShard(1).ok());
    const absl::Status status =
        emberd::Await([&] { return Digest(*client_, model_).status(); }, Answered);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("shard 1"), HasSubstr(file)));
  }
  // What the same steps make of the tables on a cluster that nobody disturbs.
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
  // Of all files in the folder of checkpoints, also of those that are being written or removed.
  int64_t CheckpointBytes() {
    int64_t bytes = 0;
    std::error_code error;
    std::filesystem::recursive_directory_iterator file(storage_.path() + "/checkpoints", error);
    for (; !error && file != std::filesystem::end(file); file.increment(error)) {
      std::error_code gone;
      const uintmax_t size = file->file_size(gone);
      if (!gone) bytes += static_cast<int64_t>(size);
    }
    return bytes;
  }
  std::vector<std::filesystem::path> LogFiles(int shard, const std::string& extension) {
    std::vector<std::filesystem::path> files;
    for (const auto& file : std::filesystem::directory_iterator(
             absl::StrCat(storage_.path(), "/shard-000", shard, "/log"))) {
      if (file.path().extension() == extension) files.push_back(file.path());
    }
    std::sort(files.begin(), files.end());
    return files;
  }

  const TempDir storage_ = *TempDir::Create();
};

TEST_F(LogTest, AKilledShardComesBackWithEveryUpdate) {
  Start();
  int steps = 0;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(Train(steps++));
    const std::string before = Tables();
    ASSERT_NO_FATAL_FAILURE(LoseShard(round % kShards));
    ASSERT_EQ(Tables(), before) << "after round " << round;
  }
  EXPECT_EQ(Tables(), Undisturbed(steps));
}

TEST_F(LogTest, AllProcessesMayDieAtOnce) {
  Start();
  for (int step = 0; step < 5; ++step) ASSERT_NO_FATAL_FAILURE(Train(step));
  ASSERT_NO_FATAL_FAILURE(KillAll());
  for (int step = 5; step < 7; ++step) ASSERT_NO_FATAL_FAILURE(Train(step));
  ASSERT_NO_FATAL_FAILURE(KillAll());
  EXPECT_EQ(Tables(), Undisturbed(7));
}

TEST_F(LogTest, ARetryAfterTheShardsDiedIsAnsweredAndNotAppliedAgain) {
  Start("fsync: ALWAYS");
  const std::vector<OwnedIds> batch = MixedBatch(1, kSamples);
  auto found = client_->Lookup(model_, Features(batch));
  ASSERT_TRUE(found.ok()) << found.status();
  const auto values = MixedGradients(1, *found);
  client::ApplyOptions options;
  options.sequence = client_->NextSequence();
  auto first = client_->ApplyGradients(model_, found->batch, Gradients(*found, values), options);
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string before = Tables();
  ASSERT_NO_FATAL_FAILURE(KillAll());
  auto again = Await([&] {
    return client_->ApplyGradients(model_, found->batch, Gradients(*found, values), options);
  });
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->replayed);
  EXPECT_EQ(again->rows_updated, first->rows_updated);
  EXPECT_EQ(Tables(), before);
}

TEST_F(LogTest, LongLogsAreSavedAndCutShort) {
  Start("log_bytes: 1048576");
  int steps = 0;
  const auto first_segment = [&] { return LogFiles(0, ".records").front(); };
  const std::filesystem::path oldest = first_segment();
  const absl::Time end = absl::Now() + kPatience;
  for (; absl::Now() < end && first_segment() == oldest; ++steps) {
    ASSERT_NO_FATAL_FAILURE(Train(steps));
    if (steps > 200) absl::SleepFor(absl::Milliseconds(20));  // the coordinator looks now and then
  }
  ASSERT_NE(first_segment(), oldest) << "nothing was saved";
  for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(Train(steps++));
  const std::string before = Tables();
  ASSERT_NO_FATAL_FAILURE(KillAll());
  EXPECT_EQ(Tables(), before);
  EXPECT_EQ(before, Undisturbed(steps));
}

// Where every row changes between two checkpoints, each takes as much as a full one; so it is one,
// and those before it go.
TEST_F(LogTest, AutomaticCheckpointsTakeABoundedPartOfTheDisk) {
  Start("log_bytes: 1048576");
  std::set<std::string> saved;
  int64_t full = 0, most = 0;
  int steps = 0;
  for (const absl::Time end = absl::Now() + kPatience; saved.size() < 7 && absl::Now() < end;) {
    ASSERT_NO_FATAL_FAILURE(Train(steps++));
    const auto list = client_->ListCheckpoints("mixed");
    ASSERT_TRUE(list.ok()) << list.status();
    for (const client::CheckpointInfo& info : list->checkpoints) {
      saved.insert(info.name);
      full = std::max(full, info.bytes);
    }
    most = std::max(most, CheckpointBytes());
    absl::SleepFor(absl::Milliseconds(10));  // the coordinator looks now and then
  }
  EXPECT_GE(saved.size(), 7u);
  EXPECT_LE(most, 4 * full);  // 3.5, and manifests
  ASSERT_NO_FATAL_FAILURE(KillAll());
  EXPECT_EQ(Tables(), Undisturbed(steps));
}

TEST_F(LogTest, ResetsAndDropsAreRemembered) {
  Start();
  const std::string initial = Tables();
  ASSERT_NO_FATAL_FAILURE(Train(0));
  ASSERT_TRUE(client_->ResetModel("mixed").ok());
  ASSERT_NO_FATAL_FAILURE(KillAll());
  auto described = Await([&] { return client_->DescribeModel("mixed"); });
  ASSERT_TRUE(described.ok());
  model_ = *described;
  EXPECT_EQ(Tables(), initial);

  ASSERT_TRUE(client_->DropModel("mixed").ok());
  ASSERT_NO_FATAL_FAILURE(KillAll());
  const absl::Status gone =
      emberd::Await([&] { return client_->DescribeModel("mixed").status(); }, Answered);
  EXPECT_EQ(gone.code(), absl::StatusCode::kNotFound) << gone;
}

TEST_F(LogTest, ARestoredModelComesBackAsItWasAfterTheRestore) {
  Start();
  ASSERT_NO_FATAL_FAILURE(Train(0));
  auto saved = client_->SaveCheckpoint("mixed", {.name = "mine"});
  ASSERT_TRUE(saved.ok()) << saved.status();
  ASSERT_NO_FATAL_FAILURE(Train(1));
  auto restored = client_->RestoreCheckpoint("mixed", {.name = "mine"});
  ASSERT_TRUE(restored.ok()) << restored.status();
  model_ = *client_->DescribeModel("mixed");
  ASSERT_NO_FATAL_FAILURE(Train(1));
  ASSERT_NO_FATAL_FAILURE(KillAll());
  model_ = *Await([&] { return client_->DescribeModel("mixed"); });
  EXPECT_EQ(Tables(), Undisturbed(2));
}

// Nobody has told the shards to serve what was restored, and nobody will.
TEST_F(LogTest, ARestoreThatDiesBeforeItIsServedCanBeMadeAgain) {
  Start("", {{"coordinator-0", "model.is_made=die@2"}});
  ASSERT_NO_FATAL_FAILURE(Train(0));
  const std::string tables = Tables();
  ASSERT_TRUE(client_->SaveCheckpoint("mixed", {.name = "mine"}).ok());
  ASSERT_NO_FATAL_FAILURE(Train(1));
  EXPECT_FALSE(client_->RestoreCheckpoint("mixed", {.name = "mine"}).ok());
  ASSERT_NO_FATAL_FAILURE(KillAll());
  const auto restored =
      Await([&] { return client_->RestoreCheckpoint("mixed", {.name = "mine"}); });
  ASSERT_TRUE(restored.ok()) << restored.status();
  model_ = *client_->DescribeModel("mixed");
  EXPECT_EQ(Tables(), tables);
  ASSERT_NO_FATAL_FAILURE(KillAll());
  EXPECT_EQ(Tables(), tables);
}

TEST_F(LogTest, TheCheckpointThatLogsGoOnFromStays) {
  Start();
  const auto save = [&](const std::string& name) {
    return client_->SaveCheckpoint("mixed", {.name = name}).status();
  };
  const auto deletes = [&](const std::string& name) {
    return client_->DeleteCheckpoint("mixed", name).status();
  };
  AwaitFirstCheckpoint();  // a later one would take the place of those below
  ASSERT_NO_FATAL_FAILURE(Train(0));
  ASSERT_TRUE(save("one").ok());
  const absl::Status refused = deletes("one");
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("\"one\""), HasSubstr("`emberctl checkpoint save mixed`")));
  ASSERT_NO_FATAL_FAILURE(Train(1));
  ASSERT_TRUE(save("two").ok());
  EXPECT_TRUE(deletes("one").ok());
  EXPECT_FALSE(deletes("two").ok());
  ASSERT_NO_FATAL_FAILURE(KillAll());
  EXPECT_EQ(Tables(), Undisturbed(2));
  EXPECT_FALSE(deletes("two").ok());
  ASSERT_TRUE(client_->DropModel("mixed").ok());
  const absl::Status deleted = deletes("two");
  EXPECT_TRUE(deleted.ok()) << deleted;
  // Nothing of the model is needed any more.
  ASSERT_NO_FATAL_FAILURE(KillAll());
  auto again = Await([&] { return client_->DeclareModel(MixedModel("mixed")); });
  ASSERT_TRUE(again.ok()) << again.status();
  model_ = *again;
  ASSERT_NO_FATAL_FAILURE(Train(0));
  EXPECT_EQ(Tables(), Undisturbed(1));
}

// The merge takes files away that the shard is about to read.
TEST_F(LogTest, ACheckpointMayBeMergedWhileAShardComesBack) {
  Start("", {{"shard-1", "every life: restore.rows_are_next=stop"}});
  AwaitFirstCheckpoint();
  ASSERT_NO_FATAL_FAILURE(Train(0));
  ASSERT_TRUE(client_->SaveCheckpoint("mixed", {.name = "one"}).ok());
  ASSERT_NO_FATAL_FAILURE(Train(1));
  ASSERT_TRUE(client_->SaveCheckpoint("mixed", {.name = "two", .incremental = true}).ok());
  ASSERT_EQ(client_->ListCheckpoints("mixed")->checkpoints[0].chain, 1);
  cluster_->KillShard(1);
  ASSERT_TRUE(cluster_->LaunchShard(1).ok());
  ASSERT_TRUE(cluster_->AwaitShardStandstill(1));
  v1::MergeCheckpointRequest merge;
  merge.set_model("mixed");
  merge.set_name("two");
  v1::CheckpointProgress progress;
  const grpc::Status merged = Call(&v1::CheckpointService::Stub::MergeCheckpoint,
                                   Api(cluster_->address()), merge, &progress);
  EXPECT_TRUE(merged.ok()) << merged.error_message();
  cluster_->ResumeShard(1);
  ASSERT_TRUE(cluster_->AwaitShard(1).ok());
  EXPECT_EQ(Tables(), Undisturbed(2));
}

// Rows that are stored in another way than in the checkpoint are read one by one, without comparing
// checksums on the way.
TEST_F(LogTest, ADamagedCheckpointOfAnotherStorageTypeIsNamedAndNothingIsServed) {
  // The one that comes by itself after the restore is not heard of by shard 1. (Of two coordinators
  // both may make the first.)
  Start("", {{"shard-1", "save.is_a_checkpoint_now=die@3"}}, /*coordinators=*/1);
  AwaitFirstCheckpoint();
  ASSERT_NO_FATAL_FAILURE(Train(0));
  ASSERT_TRUE(client_->SaveCheckpoint("mixed", {.name = "mine"}).ok());
  v1::GetCheckpointRequest get;
  get.set_model("mixed");
  get.set_name("mine");
  v1::CheckpointManifest manifest;
  ASSERT_TRUE(
      Call(&v1::CheckpointService::Stub::GetCheckpoint, Api(cluster_->address()), get, &manifest)
          .ok());
  ASSERT_TRUE(client_->DropModel("mixed").ok());
  v1::ModelConfig config = manifest.config();
  for (v1::TableConfig& table : *config.mutable_tables()) table.set_storage_dtype(v1::BFLOAT16);
  const auto restored =
      client_->RestoreCheckpoint("mixed", {.name = "mine", .config = config.DebugString()});
  ASSERT_TRUE(restored.ok()) << restored.status();
  ASSERT_TRUE(cluster_->shard_process(1)->WaitFor(kPatience));
  int changed = 0;
  for (const v1::CheckpointFile& file : manifest.files()) {
    if (file.array() != "weights" || file.rows() == 0) continue;
    std::fstream bytes(absl::StrCat(storage_.path(), "/checkpoints/mixed/mine/", file.path()),
                       std::ios::in | std::ios::out | std::ios::binary);
    constexpr int kInValues = 4096 + 3;
    bytes.seekg(kInValues);
    const char flipped = static_cast<char>(bytes.peek() ^ 4);
    bytes.seekp(kInValues);
    bytes.put(flipped);
    ++changed;
  }
  ASSERT_GT(changed, 0);
  ASSERT_TRUE(cluster_->RestartShard(1).ok());
  model_ = *Await([&] { return client_->DescribeModel("mixed"); });
  const absl::Status status =
      emberd::Await([&] { return Digest(*client_, model_).status(); }, Answered);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("shard 1"), HasSubstr("checksum"),
                    HasSubstr("; bring it back, or move the shards' folders away and restore")));
}

// A shard that did not hear of a checkpoint goes on from the one before.
TEST_F(LogTest, TheCheckpointStaysThatOneShardsLogGoesOnFrom) {
  // The first save comes by itself: once, where there is one coordinator.
  Start("", {{"shard-1", "save.is_a_checkpoint_now=die@3"}}, /*coordinators=*/1);
  AwaitFirstCheckpoint();
  const auto save = [&](const std::string& name) {
    return client_->SaveCheckpoint("mixed", {.name = name}).status();
  };
  ASSERT_NO_FATAL_FAILURE(Train(0));
  ASSERT_TRUE(save("a").ok());
  ASSERT_NO_FATAL_FAILURE(Train(1));
  ASSERT_TRUE(save("b").ok());
  ASSERT_TRUE(cluster_->shard_process(1)->WaitFor(kPatience));
  ASSERT_TRUE(cluster_->RestartShard(1).ok());
  Tables();  // the shard is back
  const absl::Status refused = client_->DeleteCheckpoint("mixed", "a").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  ASSERT_NO_FATAL_FAILURE(LoseShard(1));
  EXPECT_EQ(Tables(), Undisturbed(2));
  ASSERT_TRUE(save("c").ok());
  EXPECT_TRUE(client_->DeleteCheckpoint("mixed", "a").ok());
}

TEST_F(LogTest, AGroupGoesOnFromItsLastStep) {
  Start();
  auto model = client_->DeclareModel(GroupModel("group", 0));
  ASSERT_TRUE(model.ok()) << model.status();
  client::TrainOptions options;
  options.group = "g";
  options.size = 2;
  ASSERT_TRUE(TrainGroup(*cluster_, *model, options, 2, 4).ok());
  const auto before = Digest(*client_, *model);
  ASSERT_TRUE(before.ok()) << before.status();
  ASSERT_NO_FATAL_FAILURE(KillAll());
  EXPECT_EQ(*Await([&] { return Digest(*client_, *model); }), *before);
  // It goes on with step 4: had it forgotten, it would begin again.
  ASSERT_TRUE(Await([&] { return TrainGroup(*cluster_, *model, options, 2, 4); }).ok());

  auto calm = Cluster::Start({.shards = 1, .sparsecores_per_shard = 4, .embedded = true});
  ASSERT_TRUE(calm.ok()) << calm.status();
  auto calm_client = (*calm)->Connect();
  auto calm_model = calm_client->DeclareModel(GroupModel("group", 0));
  ASSERT_TRUE(calm_model.ok()) << calm_model.status();
  options.size = 1;
  ASSERT_TRUE(TrainGroup(**calm, *calm_model, options, 1, 8).ok());
  EXPECT_EQ(*Digest(*client_, *model), *Digest(*calm_client, *calm_model));
}

// Or a trainer whose answer was lost could not tell its own step from another's.
TEST_F(LogTest, AGroupKnowsInWhichGenerationItsLastStepWasMade) {
  Start();
  const auto model = client_->DeclareModel(GroupModel("group", 0));
  ASSERT_TRUE(model.ok()) << model.status();
  uint64_t made = 0;
  for (int64_t step = 0; step < 3; ++step) {
    const auto stream = Await([&] { return client_->Train(*model, {.group = "g"}); });
    ASSERT_TRUE(stream.ok()) << stream.status();
    EXPECT_EQ((*stream)->made_generation(), made);
    made = (*stream)->generation();
    const absl::Status ran = RunSteps(**stream, 0, 1, step, step + 1, /*pipelined=*/false);
    ASSERT_TRUE(ran.ok()) << ran;
    ASSERT_NO_FATAL_FAILURE(KillAll());
  }
}

// A part that waits for the other rank's lies in a segment before the one whose state names it.
TEST_F(LogTest, WhatAnOlderSegmentHoldsForAStateStaysAfterARestart) {
  Start();
  const auto group = client_->DeclareModel(GroupModel("group", 0));
  ASSERT_TRUE(group.ok()) << group.status();
  const auto save = [&](const std::string& model, const std::string& name) {
    return client_->SaveCheckpoint(model, {.name = name}).status();
  };
  ASSERT_TRUE(save("group", "a").ok());
  ASSERT_TRUE(save("mixed", "a").ok());
  {
    absl::StatusOr<std::unique_ptr<client::TrainStream>> streams[2];
    const auto join = [&](int rank) {
      streams[rank] = client_->Train(*group, {.group = "g", .rank = rank, .size = 2});
    };
    std::thread other(join, 1);
    join(0);
    other.join();
    for (int rank = 0; rank < 2; ++rank) {
      ASSERT_TRUE(streams[rank].ok()) << streams[rank].status();
      ASSERT_TRUE((*streams[rank])->SendLookup(0, MakeShare(0, rank, 2).Features()).ok());
    }
    const auto found = (*streams[0])->ReceiveLookup();
    ASSERT_TRUE(found.ok()) << found.status();
    const Share share = MakeShare(0, 0, 2);
    const auto values = ShareGradients(0, share, found->activations);
    std::vector<client::FeatureGradient> gradients;
    for (size_t i = 0; i < values.size(); ++i) {
      gradients.push_back({share.features[i], values[i], found->activations[i].samples});
    }
    ASSERT_TRUE((*streams[0])->SendUpdate(0, gradients).ok());
    absl::SleepFor(absl::Milliseconds(500));  // on its way to the shards
    ASSERT_TRUE(save("mixed", "b").ok());
  }
  ASSERT_TRUE(Await([&] { return client_->DropGroup("group", "g"); }).ok());
  ASSERT_NO_FATAL_FAILURE(Train(0));
  const std::string before = Tables();
  for (const int shard : {0, 1}) ASSERT_NO_FATAL_FAILURE(LoseShard(shard));
  EXPECT_EQ(Tables(), before);
  ASSERT_TRUE(Await([&] { return save("group", "c"); }).ok());
  for (const int shard : {0, 1}) ASSERT_NO_FATAL_FAILURE(LoseShard(shard));
  EXPECT_EQ(Tables(), before);
}

// As when the power goes while a new log is begun: the name of its first file is there, and no
// more.
TEST_F(LogTest, ALogThatHadHardlyBegunIsBegunAgain) {
  const std::string log = storage_.Path("shard-0001/log");
  std::filesystem::create_directories(log);
  std::ofstream(log + "/0000000001.records").close();
  Start();
  ASSERT_NO_FATAL_FAILURE(Train(0));
  const std::string before = Tables();
  ASSERT_NO_FATAL_FAILURE(KillAll());
  EXPECT_EQ(Tables(), before);
}

TEST_F(LogTest, ADamagedRecordIsNamedAndNothingIsServed) {
  Start();
  AwaitFirstCheckpoint();
  for (int step = 0; step < 4; ++step) ASSERT_NO_FATAL_FAILURE(Train(step));
  cluster_->KillShard(1);
  const std::vector<std::filesystem::path> files = LogFiles(1, ".blobs");
  const std::filesystem::path file =
      *std::max_element(files.begin(), files.end(), [](const auto& a, const auto& b) {
        return std::filesystem::file_size(a) < std::filesystem::file_size(b);
      });
  {
    std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekg(5000);
    const char flipped = static_cast<char>(bytes.peek() ^ 4);
    bytes.seekp(5000);
    bytes.put(flipped);
  }
  ExpectRefusalThatNames(file.filename());
}

// Would catch: rows without the updates of a file that was not copied with the others.
TEST_F(LogTest, TheOldestFileIsMissedThatIsNeeded) {
  Start();
  AwaitFirstCheckpoint();
  const auto oldest = [&] { return LogFiles(1, ".records").front(); };
  ASSERT_TRUE(Eventually([&] { return oldest().filename() != "0000000001.records"; }));
  for (int step = 0; step < 4; ++step) ASSERT_NO_FATAL_FAILURE(Train(step));
  ASSERT_NO_FATAL_FAILURE(LoseShard(1));
  ASSERT_NO_FATAL_FAILURE(Train(4));
  cluster_->KillShard(1);
  const std::filesystem::path file = oldest();
  std::filesystem::remove(file);
  ExpectRefusalThatNames(file.filename());
}

TEST_F(LogTest, ADamagedManifestOfTheCheckpointThatALogNeedsIsNamed) {
  Start();
  AwaitFirstCheckpoint();
  ASSERT_NO_FATAL_FAILURE(Train(0));
  ASSERT_TRUE(client_->SaveCheckpoint("mixed", {.name = "a"}).ok());
  cluster_->KillShard(1);
  const std::string manifest = storage_.Path("checkpoints/mixed/a/manifest.json");
  std::filesystem::resize_file(manifest, 9);
  ExpectRefusalThatNames(manifest);
}

// Limits that were set in training are in the log, and in the state that the next segment begins
// with.
TEST_F(LogTest, LimitsOfAModelComeBack) {
  Start();
  const auto limits = [&] {
    v1::GetLimitsRequest request;
    request.set_model("mixed");
    v1::GetLimitsResponse response;
    const grpc::Status status =
        Call(&v1::AdminService::Stub::GetLimits, Api(cluster_->address()), request, &response);
    return status.ok() ? absl::StatusOr<v1::GetLimitsResponse>(response)
                       : absl::UnavailableError(status.error_message());
  };
  for (const int limit : {9, 7}) {
    v1::SetLimitsRequest request;
    request.set_model("mixed");
    const auto before = Await(limits);
    for (const v1::StackLimits& stack : before->stacks()) {
      v1::StackLimit* to = request.add_limits();
      to->set_stack(stack.stack());
      to->set_max_ids_per_partition(100 + limit);
      to->set_max_unique_ids_per_partition(limit);
    }
    v1::SetLimitsResponse response;
    ASSERT_TRUE(
        Call(&v1::AdminService::Stub::SetLimits, Api(cluster_->address()), request, &response)
            .ok());
    for (int round = 0; round < 2; ++round) {
      ASSERT_NO_FATAL_FAILURE(KillAll());
      const auto now = Await(limits);
      ASSERT_EQ(now->stacks_size(), request.limits_size());
      for (const v1::StackLimits& stack : now->stacks()) {
        EXPECT_EQ(stack.max_ids_per_partition(), 100 + limit) << stack.stack();
        EXPECT_EQ(stack.max_unique_ids_per_partition(), limit) << stack.stack();
      }
      ASSERT_NO_FATAL_FAILURE(Train(round));
    }
  }
}

}  // namespace shard_log_test
}  // namespace emberd::testing
