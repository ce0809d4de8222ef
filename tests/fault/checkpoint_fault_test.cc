// kill -9 of a coordinator or a shard at every step of saving, restoring, merging and deleting: the
// checkpoint before is whole and can be restored, the new one is whole or absent, what is left of
// it goes away with the next save, and training goes on where its processes live. A coordinator
// that stands still for longer than its pause has saved nothing when it goes on.
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster.h"
#include "tests/testing/counting.h"

namespace emberd::testing {
namespace checkpoint_fault_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr char kModelName[] = "count";
// Coordinator 0 is the one that things happen to; trainers use the other one.
constexpr int kVictim = 0, kOther = 1;
constexpr int kShard = 1;
// Of trainers, between two updates: most of the time they wait for those who are given up.
constexpr absl::Duration kPause = absl::Milliseconds(60);

class CheckpointFaultTest : public ::testing::Test {
 protected:
  // `process`: the one with the failpoint.
  void Start(const std::string& process, const std::string& failpoint) {
    auto cluster =
        Cluster::Start({.coordinators = 2,
                        .config = absl::StrCat("storage { directory: \"", storage_.path(), "\" }"),
                        .failpoints = {{process, failpoint}}});
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    victim_ = ConnectTo(kVictim);
    other_ = ConnectTo(kOther);
    ASSERT_TRUE(victim_ != nullptr && other_ != nullptr);
    auto model = other_->DeclareModel(CountingModel(kModelName));
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    auto begin = ReadCounts(*other_, model_);
    ASSERT_TRUE(begin.ok()) << begin.status();
    StartTraining(*begin);
  }
  std::unique_ptr<client::Client> ConnectTo(int coordinator) {
    client::ClientOptions options = cluster_->client_options();
    options.addresses = {cluster_->address(coordinator)};
    options.max_attempts = 1;
    auto client = client::Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }
  void StartTraining(const Counts& begin) {
    trainers_ = std::make_unique<CountingTrainers>(*cluster_, kOther, model_, begin,
                                                   absl::StrCat("trainer-", ++lives_), kPause);
    ASSERT_TRUE(trainers_->Await(2));
  }
  // They go on, and what they were told was made.
  void ExpectTrainingGoesOn() {
    EXPECT_TRUE(trainers_->Await(3));
    const absl::Status stopped = trainers_->Stop();
    EXPECT_TRUE(stopped.ok()) << stopped;
    auto counts = ReadCounts(*other_, model_);
    ASSERT_TRUE(counts.ok()) << counts.status();
    EXPECT_EQ(*counts, trainers_->made());
  }
  void RestartShard() {
    cluster_->KillShard(kShard);
    ASSERT_TRUE(cluster_->RestartShard(kShard).ok());
    trainers_->Stop().IgnoreError();  // they have heard that rows are lost
  }

  // Through the other coordinator. Tried again as the errors say.
  void Save(const std::string& name, bool incremental = false) {
    const absl::Status status = Await(
        [&] {
          return other_->SaveCheckpoint(kModelName, {.name = name, .incremental = incremental})
              .status();
        },
        [](const auto& tried) { return !absl::IsAborted(tried) && !absl::IsUnavailable(tried); });
    ASSERT_TRUE(status.ok()) << status;
  }
  std::vector<std::string> Names() {
    std::vector<std::string> names;
    auto list = other_->ListCheckpoints(kModelName);
    if (absl::IsNotFound(list.status())) return names;  // nor is it declared
    EXPECT_TRUE(list.ok()) << list.status();
    if (!list.ok()) return names;
    EXPECT_THAT(list->damaged, IsEmpty());
    for (const client::CheckpointInfo& info : list->checkpoints) names.push_back(info.name);
    return names;
  }
  // One moment of all trainers, who go on from it.
  void ExpectRestorable(const std::string& name) {
    SCOPED_TRACE(absl::StrCat("checkpoint ", name));
    // As the errors say: a shard that has just been started is not found at once, and a restore
    // that nobody finishes is given up after a while, perhaps while another one begins.
    const auto restored =
        Await([&] { return other_->RestoreCheckpoint(kModelName, {.name = name}); },
              [](const auto& tried) {
                return !absl::IsUnavailable(tried.status()) && !absl::IsAborted(tried.status());
              });
    ASSERT_TRUE(restored.ok()) << restored.status();
    auto counts = ReadCounts(*other_, model_);
    ASSERT_TRUE(counts.ok()) << counts.status();
    const absl::Status whole = CheckMoment(*counts, *restored);
    EXPECT_TRUE(whole.ok()) << whole;
    StartTraining(*counts);
    ExpectTrainingGoesOn();
  }

  // One sample without ids for each feature.
  std::vector<client::FeatureIds> NoIds() const {
    std::vector<client::FeatureIds> none;
    for (const auto& table : model_.tables) none.push_back({table.name, client::DenseIds{{}, 1}});
    return none;
  }
  std::string ModelFolder() const {
    return absl::StrCat(storage_.path(), "/checkpoints/", kModelName);
  }
  // Folders of nobody.
  std::vector<std::string> Litter() const {
    std::vector<std::string> litter;
    for (const auto& entry : std::filesystem::directory_iterator(ModelFolder())) {
      const std::string name = entry.path().filename();
      if (entry.is_directory() && absl::StartsWith(name, ".")) litter.push_back(name);
    }
    return litter;
  }
  // As if the dead had been dead for two minutes.
  void AgeLitter() {
    const timespec before = absl::ToTimespec(absl::Now() - absl::Minutes(2));
    const timespec times[] = {before, before};
    for (const std::string& name : Litter()) {
      EXPECT_EQ(utimensat(AT_FDCWD, absl::StrCat(ModelFolder(), "/", name).c_str(), times, 0), 0);
    }
  }
  // Everything that was saved is as it was, and the next save cleans up.
  void ExpectAllWell(const std::vector<std::string>& names) {
    EXPECT_THAT(Names(), ::testing::UnorderedElementsAreArray(names));
    AgeLitter();
    ASSERT_NO_FATAL_FAILURE(Save("after"));
    EXPECT_THAT(Litter(), IsEmpty());
    trainers_->Stop().IgnoreError();
    for (const std::string& name : names) ASSERT_NO_FATAL_FAILURE(ExpectRestorable(name));
    ASSERT_NO_FATAL_FAILURE(ExpectRestorable("after"));
  }

  const TempDir storage_ = *TempDir::Create();
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> victim_, other_;
  client::Model model_;
  int lives_ = 0;
  std::unique_ptr<CountingTrainers> trainers_;
};

struct Window {
  const char* failpoint;
  bool there;  // the new checkpoint, after a death here
};
std::string NameOf(const ::testing::TestParamInfo<Window>& info) {
  std::string name = info.param.failpoint;
  for (char& c : name) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return name;
}

class SaveFaultTest : public CheckpointFaultTest, public ::testing::WithParamInterface<Window> {};
INSTANTIATE_TEST_SUITE_P(
    Windows, SaveFaultTest,
    ::testing::Values(Window{"save.begins", false}, Window{"save.changes_wait", false},
                      Window{"save.files_are_here", false}, Window{"save.rows_are_written", false},
                      Window{"save.manifest_is_written", false}, Window{"save.is_renamed", true},
                      Window{"save.is_a_checkpoint", true}),
    NameOf);

TEST_P(SaveFaultTest, ADeadCoordinatorLeavesAWholeCheckpointOrNone) {
  Start("coordinator-0", absl::StrCat(GetParam().failpoint, "=die"));
  ASSERT_NO_FATAL_FAILURE(Save("before"));
  ASSERT_TRUE(trainers_->Await(2));
  EXPECT_FALSE(victim_->SaveCheckpoint(kModelName, {.name = "new", .incremental = true}).ok());
  std::vector<std::string> names = {"before"};
  if (GetParam().there) names.push_back("new");
  EXPECT_THAT(Names(), ::testing::UnorderedElementsAreArray(names));
  // Where updates wait, they go on when the pause is over, whoever is gone.
  EXPECT_TRUE(trainers_->Await(3));
  ExpectAllWell(names);
}

TEST_F(CheckpointFaultTest, AShardThatDiesWhileItSavesLeavesNothing) {
  Start("shard-1", "save.rows_are_here=die@2");
  ASSERT_NO_FATAL_FAILURE(Save("before"));
  ASSERT_TRUE(trainers_->Await(2));
  EXPECT_FALSE(victim_->SaveCheckpoint(kModelName, {.name = "new", .incremental = true}).ok());
  EXPECT_THAT(Names(), ElementsAre("before"));
  ASSERT_NO_FATAL_FAILURE(RestartShard());
  EXPECT_FALSE(ReadCounts(*other_, model_).ok()) << "the dead shard's rows are gone";
  ASSERT_NO_FATAL_FAILURE(ExpectRestorable("before"));
  ASSERT_NO_FATAL_FAILURE(ExpectAllWell({"before"}));
}

TEST_F(CheckpointFaultTest, AShardThatDiesWhileItRestoresServesNothing) {
  Start("shard-1", "restore.rows_are_here=die");
  ASSERT_NO_FATAL_FAILURE(Save("before"));
  trainers_->Stop().IgnoreError();
  EXPECT_FALSE(victim_->RestoreCheckpoint(kModelName, {.name = "before"}).ok());
  ASSERT_NO_FATAL_FAILURE(RestartShard());
  EXPECT_FALSE(ReadCounts(*other_, model_).ok()) << "the dead shard's rows are gone";
  ASSERT_NO_FATAL_FAILURE(ExpectRestorable("before"));
  ASSERT_NO_FATAL_FAILURE(ExpectAllWell({"before"}));
}

class RestoreFaultTest : public CheckpointFaultTest,
                         public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Windows, RestoreFaultTest,
                         ::testing::Values("model.is_made=die", "model.serves=die@1",
                                           "model.serves=die@2"));

TEST_P(RestoreFaultTest, HalfARestoreIsNeverServed) {
  Start("coordinator-0", GetParam());
  ASSERT_NO_FATAL_FAILURE(Save("before"));
  auto saved = other_->ListCheckpoints(kModelName);
  ASSERT_TRUE(saved.ok() && saved->checkpoints.size() == 1);
  ASSERT_TRUE(trainers_->Await(3));
  trainers_->Stop().IgnoreError();
  EXPECT_FALSE(victim_->RestoreCheckpoint(kModelName, {.name = "before"}).ok());
  // Whole, or an error.
  const auto counts = ReadCounts(*other_, model_);
  if (counts.ok()) {
    const absl::Status whole = CheckMoment(*counts, saved->checkpoints[0]);
    EXPECT_TRUE(whole.ok()) << whole;
  } else {
    EXPECT_FALSE(absl::StrContains(counts.status().message(), "has seen")) << counts.status();
  }
  ASSERT_NO_FATAL_FAILURE(ExpectRestorable("before"));
  ASSERT_NO_FATAL_FAILURE(ExpectAllWell({"before"}));
}

class MergeFaultTest : public CheckpointFaultTest, public ::testing::WithParamInterface<Window> {};
INSTANTIATE_TEST_SUITE_P(Windows, MergeFaultTest,
                         ::testing::Values(Window{"merge.files_are_here", false},
                                           Window{"merge.is_written", false},
                                           Window{"merge.is_renamed", true}),
                         NameOf);

TEST_P(MergeFaultTest, TheCheckpointHasItsRowsBeforeAndAfter) {
  Start("coordinator-0", absl::StrCat(GetParam().failpoint, "=die"));
  for (const char* name : {"a", "b", "c"}) {
    ASSERT_NO_FATAL_FAILURE(Save(name, /*incremental=*/true));
    ASSERT_TRUE(trainers_->Await(2));
  }
  v1::MergeCheckpointRequest merge;
  merge.set_model(kModelName);
  merge.set_name("c");
  v1::CheckpointProgress progress;
  const Api dying(cluster_->address(kVictim));
  EXPECT_FALSE(Call(&v1::CheckpointService::Stub::MergeCheckpoint, dying, merge, &progress).ok());
  auto list = other_->ListCheckpoints(kModelName);
  ASSERT_TRUE(list.ok() && list->checkpoints.size() == 3);
  EXPECT_EQ(list->checkpoints[0].chain, GetParam().there ? 0 : 2);
  if (!GetParam().there) {
    const Api api(cluster_->address(kOther));
    const grpc::Status merged =
        Call(&v1::CheckpointService::Stub::MergeCheckpoint, api, merge, &progress);
    EXPECT_TRUE(merged.ok()) << merged.error_message();
  }
  ASSERT_NO_FATAL_FAILURE(ExpectAllWell({"a", "b", "c"}));
  for (const char* name : {"b", "a"}) EXPECT_TRUE(other_->DeleteCheckpoint(kModelName, name).ok());
  ASSERT_NO_FATAL_FAILURE(ExpectRestorable("c"));
}

TEST_F(CheckpointFaultTest, WhatIsHalfDeletedIsGone) {
  Start("coordinator-0", "delete.is_renamed=die");
  ASSERT_NO_FATAL_FAILURE(Save("before"));
  ASSERT_NO_FATAL_FAILURE(Save("new"));
  EXPECT_FALSE(victim_->DeleteCheckpoint(kModelName, "new").ok());
  ASSERT_NO_FATAL_FAILURE(ExpectAllWell({"before"}));
}

// Its pause has ended without it, and updates were made: what it would fix now is no moment. Shards
// refuse it, and it begins again.
TEST_F(CheckpointFaultTest, ACoordinatorThatStoodStillForLongerThanItsPauseFixesALaterMoment) {
  Start("coordinator-0", "save.changes_wait=stop");
  ASSERT_NO_FATAL_FAILURE(Save("before"));
  absl::Status late;
  std::thread saving([&] {
    late = victim_->SaveCheckpoint(kModelName, {.name = "new", .incremental = true}).status();
  });
  EXPECT_TRUE(cluster_->AwaitStandstill(kVictim));
  EXPECT_TRUE(trainers_->Await(3)) << "updates go on when the pause is over";
  ASSERT_NO_FATAL_FAILURE(Save("meanwhile", /*incremental=*/true));
  cluster_->ResumeCoordinator(kVictim);
  saving.join();
  EXPECT_TRUE(late.ok()) << late;
  EXPECT_THAT(Names(), ElementsAre("new", "meanwhile", "before"));
  EXPECT_THAT(Litter(), IsEmpty());
  ExpectTrainingGoesOn();
  ASSERT_NO_FATAL_FAILURE(ExpectAllWell({"before", "meanwhile", "new"}));
}

// The shards have given it up, and another save has fixed a later moment: committed now, it would
// be the newest, with rows from before.
TEST_F(CheckpointFaultTest, ASaveThatAnotherOneHasOvertakenIsNotTheNewest) {
  Start("coordinator-0", "save.files_are_here=stop");
  absl::Status late;
  std::thread saving(
      [&] { late = victim_->SaveCheckpoint(kModelName, {.name = "late"}).status(); });
  EXPECT_TRUE(cluster_->AwaitStandstill(kVictim));
  EXPECT_TRUE(trainers_->Await(3));
  Save("meanwhile");
  cluster_->ResumeCoordinator(kVictim);
  saving.join();
  EXPECT_TRUE(absl::IsAborted(late)) << late;
  EXPECT_THAT(Names(), ElementsAre("meanwhile"));
  ExpectTrainingGoesOn();
  ASSERT_NO_FATAL_FAILURE(ExpectAllWell({"meanwhile"}));
}

// It would bring them back.
TEST_F(CheckpointFaultTest, RowsThatAreDroppedBeforeTheyAreACheckpointNeverAreOne) {
  Start("coordinator-0", "save.files_are_here=stop");
  absl::Status late;
  std::thread saving(
      [&] { late = victim_->SaveCheckpoint(kModelName, {.name = "late"}).status(); });
  EXPECT_TRUE(cluster_->AwaitStandstill(kVictim));
  const auto dropped = other_->DropModel(kModelName);
  EXPECT_TRUE(dropped.ok()) << dropped.status();
  trainers_->Stop().IgnoreError();
  cluster_->ResumeCoordinator(kVictim);
  saving.join();
  EXPECT_FALSE(late.ok());
  EXPECT_THAT(Names(), IsEmpty());
  EXPECT_THAT(Litter(), IsEmpty());
}

// The other save is under way until shards give it up, for its coordinator stands still. What this
// would catch: a checkpoint of a step that is refused meanwhile, or that holds back training.
TEST_F(CheckpointFaultTest, ACheckpointOfAStepWaitsForItsTurn) {
  Start("coordinator-0", "save.files_are_here=stop");
  std::thread saving([&] { victim_->SaveCheckpoint(kModelName).status().IgnoreError(); });
  EXPECT_TRUE(cluster_->AwaitStandstill(kVictim));
  auto stream = other_->Train(model_, {.group = "steps"});
  ASSERT_TRUE(stream.ok()) << stream.status();
  const std::vector<client::FeatureIds> none = NoIds();
  client::TrainUpdateResult updated;
  for (int64_t step = 0; updated.checkpoint.empty(); ++step) {
    ASSERT_TRUE((*stream)->SendLookup(step, none).ok());
    ASSERT_TRUE((*stream)->ReceiveLookup().ok());
    const std::string checkpoint = step == 0 ? "asked" : "";
    ASSERT_TRUE((*stream)->SendUpdate(step, {}, {.checkpoint = checkpoint, .skip = true}).ok());
    auto result = (*stream)->ReceiveUpdate();
    ASSERT_TRUE(result.ok()) << result.status();
    updated = *result;
  }
  EXPECT_EQ(updated.checkpoint, "asked");
  EXPECT_EQ(updated.checkpoint_error, "");
  EXPECT_TRUE((*stream)->Finish().ok());
  cluster_->ResumeCoordinator(kVictim);
  saving.join();
  ExpectTrainingGoesOn();
}

// What this would catch: a checkpoint without a deadline, for which the update waits until the
// connection to the shard breaks.
TEST_F(CheckpointFaultTest, ACheckpointOfAStepGivesUpAStoppedShard) {
  auto cluster = Cluster::Start({.config = absl::StrCat("storage { directory: \"", storage_.path(),
                                                        "\" } timeouts { shard_call_ms: 5000 }")});
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  cluster_ = *std::move(cluster);
  other_ = ConnectTo(0);
  ASSERT_NE(other_, nullptr);
  const auto model = other_->DeclareModel(CountingModel(kModelName));
  ASSERT_TRUE(model.ok()) << model.status();
  model_ = *model;
  auto stream = other_->Train(model_, {.group = "steps"});
  ASSERT_TRUE(stream.ok()) << stream.status();
  ASSERT_TRUE((*stream)->SendLookup(0, NoIds()).ok());
  ASSERT_TRUE((*stream)->ReceiveLookup().ok());
  cluster_->SuspendShard(kShard);
  ASSERT_TRUE((*stream)->SendUpdate(0, {}, {.checkpoint = "asked", .skip = true}).ok());
  EXPECT_FALSE((*stream)->ReceiveUpdate().ok());
  cluster_->ResumeShard(kShard);
  EXPECT_THAT(cluster_->CoordinatorLog(),
              ::testing::ContainsRegex("could not be saved [^\n]*Deadline Exceeded"));
}

}  // namespace checkpoint_fault_test
}  // namespace emberd::testing
