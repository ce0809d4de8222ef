// Each call on each kind of file that servers make in the life of a model is tried as one that
// fails, once or until the fault is lifted; which calls there are is recorded. Whatever fails, no
// server dies, each refusal says why, what is read is not older than what was answered, training
// goes on when the fault is lifted, and after a restart the rows have seen each update that was
// answered once. Catches: an error that is dropped, or taken for "there is none".
//
// EMBERD_FILE_FAULT=TEXT tries those alone whose "STEP: CALL PATH, ..." has the text in it.
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <signal.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/child_process.h"
#include "base/status.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "base/testing/paths.h"
#include "config/config.h"
#include "gtest/gtest-spi.h"
#include "gtest/gtest.h"
#include "tests/fault/eviction_cluster.h"
#include "tests/fault/file_faults_cluster.h"
#include "tests/testing/testing_program.h"

namespace emberd::testing {
namespace file_faults_test {

using FileFaultsTest = FileFaultsCluster;

// ---- Servers that run

TEST_F(FileFaultsTest, RunningServersGoOn) {
  ASSERT_NO_FATAL_FAILURE(Start("durability: LOG log_bytes: 1048576 fsync: ALWAYS", 2));
  ASSERT_NO_FATAL_FAILURE(TryAll(kLife));
  ASSERT_NO_FATAL_FAILURE(ExpectNoLitter());
  ASSERT_NO_FATAL_FAILURE(RestartAll());
  ASSERT_NO_FATAL_FAILURE(ExpectGoesOn());
}

// ---- Servers that start

class FileFaultsAtStart : public FileFaultsCluster {
 protected:
  // What the rows have seen when shards that were killed are back.
  int64_t Kept() const { return logs_ ? made_ : checkpoints_.at(newest_); }
  void TryAllStarts(bool logs) {
    logs_ = logs;
    ASSERT_NO_FATAL_FAILURE(
        Start(logs ? "durability: LOG" : "durability: CHECKPOINT every_seconds: 86400", 1));
    for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(Change());
    for (const Fault& fault : FaultsOfStart()) {
      TryStart(fault);
      if (HasFailure()) return;
    }
  }
  // So that the newest checkpoint is another one than the one before, and not that of the rows.
  void Change() {
    ASSERT_NO_FATAL_FAILURE(ExpectGoesOn());
    const absl::Status saved = ++changes_ % 2 == 0 ? Save() : SaveIncrementally();
    ASSERT_TRUE(saved.ok()) << saved;
    ASSERT_TRUE(Delete().ok());
    ASSERT_TRUE(Train().ok());
  }
  // Whether it is ready.
  bool StartShard() {
    cluster_->KillShard(0);
    EXPECT_TRUE(cluster_->LaunchShard(0).ok());
    return cluster_->AwaitShard(0).ok();
  }
  void ExpectBack() {
    const auto rows = Await([&] { return Rows(); });
    ASSERT_TRUE(rows.ok()) << rows.status();
    ASSERT_EQ(*rows, Kept());
    made_ = Kept();
  }
  std::vector<Fault> FaultsOfStart();
  void TryStart(const Fault& fault);

  bool logs_ = false;
  int changes_ = 0;
};

std::vector<FileFaultsCluster::Fault> FileFaultsAtStart::FaultsOfStart() {
  faults_.Forget();
  EXPECT_TRUE(StartShard());
  ExpectBack();
  std::vector<Fault> faults;
  AddRecorded({"start", nullptr}, &faults);
  // A start takes its time.
  std::erase_if(faults, [](const Fault& fault) { return fault.ordinal > 1; });
  return faults;
}

void FileFaultsAtStart::TryStart(const Fault& fault) {
  if (!Wanted(fault)) return;
  SCOPED_TRACE(fault.Text());
  ASSERT_NO_FATAL_FAILURE(Change());
  faults_.Fail(fault.call, fault.error, fault.ordinal, fault.lasting);
  const bool ready = StartShard();
  absl::StatusOr<int64_t> rows = absl::UnavailableError("the shard has ended");
  if (ready) {
    // Until it is back, or says what is in its way.
    Eventually([&] {
      rows = Rows();
      return rows.ok() || NeedsRestart(rows.status()) ||
             absl::StrContains(rows.status().message(), data_);
    });
    if (!rows.ok()) ExpectSaysWhy(rows.status());
    EXPECT_EQ(rows.value_or(Kept()), Kept());
  } else {
    EXPECT_GE(cluster_->shard_process(0)->exit_status(), 0) << cluster_->shard_process(0)->End();
  }
  faults_.Lift();
  if (!ready || NeedsRestart(rows.status())) {
    ASSERT_TRUE(StartShard());
  }
  ASSERT_NO_FATAL_FAILURE(ExpectBack());
}

TEST_F(FileFaultsAtStart, ShardsWithLogsComeBack) { TryAllStarts(/*logs=*/true); }
TEST_F(FileFaultsAtStart, ShardsWithCheckpointsComeBack) { TryAllStarts(/*logs=*/false); }

// ---- Servers that stop, and save first

class FileFaultsAtStop : public FileFaultsCluster {
 protected:
  void Stop(int* status) {
    ASSERT_TRUE(Train().ok());
    ChildProcess& coordinator = *cluster_->coordinator_process(0);
    coordinator.Signal(SIGTERM);
    ASSERT_TRUE(coordinator.WaitFor(kPatience));
    *status = coordinator.exit_status();
  }
  void StopAndSave() {
    int status = -1;
    ASSERT_NO_FATAL_FAILURE(Stop(&status));
    EXPECT_EQ(status, 0);
  }
  void StartAgain() {
    faults_.Lift();
    ASSERT_TRUE(cluster_->RestartCoordinator(0).ok());
    ASSERT_NO_FATAL_FAILURE(ExpectGoesOn());
  }
};

TEST_F(FileFaultsAtStop, ACoordinatorThatCannotSaveEndsInOrderAndSaysSo) {
  ASSERT_NO_FATAL_FAILURE(Start("durability: CHECKPOINT every_seconds: 86400", 1));
  ASSERT_NO_FATAL_FAILURE(StopAndSave());
  ASSERT_NO_FATAL_FAILURE(StartAgain());
  faults_.Forget();
  ASSERT_NO_FATAL_FAILURE(StopAndSave());
  std::vector<Fault> faults;
  AddRecorded({"stop", nullptr}, &faults);
  ASSERT_NO_FATAL_FAILURE(StartAgain());
  int could_not_save = 0;
  for (const Fault& fault : faults) {
    const std::string& call = fault.call.call;
    const bool saves = call == "create" || call == "rename" || call == "sync";
    if (!fault.lasting || !saves || !Wanted(fault)) continue;
    SCOPED_TRACE(fault.Text());
    faults_.Fail(fault.call, fault.error, fault.ordinal, fault.lasting);
    int status = -1;
    ASSERT_NO_FATAL_FAILURE(Stop(&status));
    EXPECT_THAT(status, ::testing::AnyOf(0, 1));  // 0: what failed was not needed
    could_not_save += status;
    ASSERT_NO_FATAL_FAILURE(StartAgain());
  }
  EXPECT_GT(could_not_save, 0);
}

// ---- Rows that are not in memory

class SpillFaultsTest : public FileFaultsCluster {
 public:
  // With memory for one of two models, and for batches.
  void SetUp() override {
    constexpr char kLogs[] = "durability: LOG";
    ASSERT_NO_FATAL_FAILURE(Start(kLogs, 1));
    const int64_t bytes = ShardStatusOf(*cluster_, 0).partitions(0).table_bytes();
    FileFaultsCluster::TearDown();
    ASSERT_NO_FATAL_FAILURE(
        Start(kLogs, 1,
              absl::StrCat("budgets { bytes_per_sparsecore: ", bytes + bytes / 2,
                           " } eviction { spill_folder: \"", data_, "/spill\" }")));
    auto other = client_->DeclareModel(CountingModel("other"));
    ASSERT_TRUE(other.ok()) << other.status();
    other_ = *std::move(other);
    const std::vector<float> values(kRowIds.size() * other_.tables[0].embedding_dim, kOtherValue);
    client::AssignOptions options;
    options.sequence = ++sequence_;
    ASSERT_TRUE(client_->AssignRows(other_, "t", kRowIds, values, options).ok());
  }
  absl::Status UseOther() {
    ASSIGN_OR_RETURN(const client::RowValues rows, client_->ReadRows(other_, "t", kRowIds));
    for (const float value : rows.values) EXPECT_EQ(value, kOtherValue);
    return absl::OkStatus();
  }
  void ExpectMore() override {
    absl::Status status =
        Await([&] { return UseOther(); },
              [](const absl::Status& tried) { return tried.ok() || NeedsRestart(tried); });
    if (NeedsRestart(status)) {
      ASSERT_NO_FATAL_FAILURE(RestartShards());
      status = Await([&] { return UseOther(); });
    }
    ASSERT_TRUE(status.ok()) << status;
  }

  static constexpr float kOtherValue = 7;
  client::Model other_;
};

TEST_F(SpillFaultsTest, EvictedRowsComeBackOrSayWhy) {
  const auto use_other = static_cast<Step>(&SpillFaultsTest::UseOther);
  ASSERT_NO_FATAL_FAILURE(TryAll({{"bring the other in", use_other, {&SpillFaultsTest::Train}},
                                  {"bring it back", &SpillFaultsTest::Train, {use_other}}}));
  ASSERT_NO_FATAL_FAILURE(RestartAll());
}

// ---- Tokens

// Whose tokens are lost with the power lets nobody in any more.
TEST(TokenFileTest, IsOnTheDiskBeforeItReplacesTheOldOne) {
  const TempDir dir = *TempDir::Create();
  const std::string folder = dir.Path("secrets");
  ASSERT_TRUE(std::filesystem::create_directory(folder));
  FileFaults faults(dir.Path("control"), folder);
  const auto add = [&](const std::string& name) {
    setenv("EMBERD_FILE_FAULTS", faults.environment().c_str(), /*overwrite=*/1);
    TestingProgram program({BuildPath("tests/emberd_faulty"), "token", name, "trainer", "--file",
                            absl::StrCat(folder, "/tokens")});
    unsetenv("EMBERD_FILE_FAULTS");
    return program.Wait();
  };
  ASSERT_EQ(add("alice"), 0);
  faults.Fail({.call = "sync", .path = "tokens.#.tmp"}, EIO, /*ordinal=*/1, /*lasting=*/true);
  EXPECT_EQ(add("bob"), 1);
  faults.Lift();
  ASSERT_EQ(add("carol"), 0);
  const auto tokens = config::LoadTokenFile(absl::StrCat(folder, "/tokens"));
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  ASSERT_EQ(tokens->tokens_size(), 2);
  EXPECT_EQ(tokens->tokens(0).name(), "alice");
  EXPECT_EQ(tokens->tokens(1).name(), "carol");
}

// ---- The tests would notice

// Mistakes like this one are in README.md.
TEST_F(FileFaultsTest, AnErrorThatIsDroppedIsFound) {
  ASSERT_NO_FATAL_FAILURE(Start("durability: LOG log_bytes: 1048576", 2, "",
                                {{"coordinator-0", "files.rename_unchecked=mistake"}}));
  ::testing::TestPartResultArray found;
  {
    const ::testing::ScopedFakeTestPartResultReporter here(&found);
    for (const Fault& fault : FaultsOf({kLife[1]})) {
      if (fault.call.call == "rename") Try(fault);
    }
  }
  EXPECT_GT(found.size(), 0);
}

}  // namespace file_faults_test
}  // namespace emberd::testing
