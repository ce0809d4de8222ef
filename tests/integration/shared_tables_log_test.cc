// Logs and checkpoints of models that share a table: a kill of a shard that has a log loses nothing
// of what any of the models did, also such as were dropped, though one checkpoint cuts the log of
// all. A log that begins with a checkpoint of one model would make the changes of the other twice,
// and one that is cut after a drop would lose them: the rows would differ from those of a cluster
// that nobody disturbs.
#include <cerrno>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/shared_tables_cluster.h"
#include "tests/testing/cluster.h"
#include "tests/testing/file_faults.h"

namespace emberd::testing {
namespace shared_tables_log_test {

using ::testing::Contains;
using ::testing::HasSubstr;

using SharedTablesLogTest = SharedTablesTest;

// The same steps on a cluster with logs whose shards are killed again and again, and on one
// without.
TEST_F(SharedTablesLogTest, KilledShardsComeBackWithWhatAllModelsDid) {
  std::vector<Rows> results[2];
  for (const bool killed : {false, true}) {
    ASSERT_NO_FATAL_FAILURE(killed ? Start("", "LOG fsync: ALWAYS") : Start());
    const auto kill = [&] {
      if (!killed) return;
      ASSERT_NO_FATAL_FAILURE(LoseShards());
    };
    const auto save = [&](const std::string& model, const std::string& name) {
      if (!killed) return;
      ASSERT_NO_FATAL_FAILURE(Save(model, name));
    };
    client::Model a = Declare("a"), b = Declare("b");
    for (int i = 0; i < 3; ++i) {
      ASSERT_NO_FATAL_FAILURE(Step(a, 10 + i));
      ASSERT_NO_FATAL_FAILURE(Step(b, 20 + i));
    }
    ASSERT_NO_FATAL_FAILURE(kill());
    ASSERT_NO_FATAL_FAILURE(save("a", "first"));
    ASSERT_NO_FATAL_FAILURE(Step(b, 30));
    ASSERT_NO_FATAL_FAILURE(save("b", "second"));
    ASSERT_NO_FATAL_FAILURE(Step(a, 31));
    ASSERT_NO_FATAL_FAILURE(kill());
    results[killed].push_back(Read(a));
    results[killed].push_back(Read(b));
    // What the first one did stays when it goes, and the log has it, though the segments that it
    // began with are long over.
    ASSERT_NO_FATAL_FAILURE(Drop("a"));
    ASSERT_NO_FATAL_FAILURE(save("b", "third"));
    ASSERT_NO_FATAL_FAILURE(Step(b, 32));
    ASSERT_NO_FATAL_FAILURE(save("b", "fourth"));
    ASSERT_NO_FATAL_FAILURE(kill());
    ASSERT_NO_FATAL_FAILURE(kill());
    results[killed].push_back(Read(b));
    // One who comes later finds them.
    client::Model c = Declare("c");
    ASSERT_NO_FATAL_FAILURE(Step(c, 33));
    ASSERT_NO_FATAL_FAILURE(Drop("b"));
    ASSERT_NO_FATAL_FAILURE(save("c", "fifth"));
    ASSERT_NO_FATAL_FAILURE(kill());
    results[killed].push_back(Read(c));
    // So does one who never changes anything, when all that did are gone.
    client::Model d = Declare("d");
    ASSERT_NO_FATAL_FAILURE(Step(c, 34));
    ASSERT_NO_FATAL_FAILURE(Drop("c"));
    ASSERT_NO_FATAL_FAILURE(save("d", "sixth"));
    ASSERT_NO_FATAL_FAILURE(kill());
    results[killed].push_back(Read(d));
  }
  for (size_t i = 0; i < results[0].size(); ++i) {
    EXPECT_EQ(results[0][i].users, results[1][i].users) << i;
    EXPECT_EQ(results[0][i].accumulators, results[1][i].accumulators) << i;
    EXPECT_EQ(results[0][i].own, results[1][i].own) << i;
  }
}

TEST_F(SharedTablesLogTest, ACheckpointComesBackIntoAModelThatIsAlone) {
  ASSERT_NO_FATAL_FAILURE(Start("", "LOG"));
  client::Model a = Declare("a"), b = Declare("b");
  ASSERT_NO_FATAL_FAILURE(Step(a, 1));
  ASSERT_NO_FATAL_FAILURE(Step(b, 2));
  const std::vector<float> saved_rows = Read(a).users;
  ASSERT_TRUE(client_->SaveCheckpoint("a", {.name = "one"}).ok());
  ASSERT_NO_FATAL_FAILURE(Step(b, 3));
  // Everything, though little has changed: what the other has changed is not known.
  const auto whole = client_->SaveCheckpoint("a", {.name = "two", .incremental = true});
  ASSERT_TRUE(whole.ok()) << whole.status();
  const std::vector<float> newer_rows = Read(b).users;
  const auto refused = client_->RestoreCheckpoint("a", {.name = "one"});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("with model 'b'"));
  EXPECT_EQ(Read(b).users, newer_rows);
  // A copy that is served is nobody else's.
  const auto served = client_->ServeCheckpoint("a", {.name = "one", .serve_as = "copy"});
  ASSERT_TRUE(served.ok()) << served.status();
  ASSERT_NO_FATAL_FAILURE(Step(b, 4));
  const auto copy = client_->DescribeModel("copy");
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(*Table(*client_, *copy, "users"), saved_rows);

  ASSERT_NO_FATAL_FAILURE(Drop("b"));
  EXPECT_FALSE(client_->DeleteCheckpoint("a", "two").ok());  // logs begin with it
  ASSERT_TRUE(client_->RestoreCheckpoint("a", {.name = "one"}).ok());
  ASSERT_TRUE(client_->DeleteCheckpoint("a", "two").ok());  // no log begins with it any more
  a = *client_->DescribeModel("a");
  EXPECT_EQ(Read(a).users, saved_rows);
  ASSERT_NO_FATAL_FAILURE(Step(a, 5));
  const Rows before = Read(a);
  ASSERT_NO_FATAL_FAILURE(LoseShards());
  EXPECT_EQ(Read(a), before);
  // Whoever joins goes on from there, too.
  client::Model c = Declare("c");
  EXPECT_EQ(Read(c).users, before.users);
  ASSERT_NO_FATAL_FAILURE(Step(c, 6));
  const Rows of_a = Read(a), of_c = Read(c);
  ASSERT_NO_FATAL_FAILURE(LoseShards());
  EXPECT_EQ(Read(a), of_a);
  EXPECT_EQ(Read(c), of_c);
}

TEST_F(SharedTablesLogTest, OneCheckpointCutsTheLogOfAllWhoShare) {
  ASSERT_NO_FATAL_FAILURE(Start("", "LOG fsync: ALWAYS"));
  client::Model a = Declare("a"), b = Declare("b");
  const uint64_t sequence = client_->NextSequence();
  const auto first = Train(*client_, b, 1, sequence);
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_NO_FATAL_FAILURE(Step(a, 2));
  ASSERT_NO_FATAL_FAILURE(ExpectCut("a", "one"));
  ASSERT_NO_FATAL_FAILURE(Step(b, 3));
  const Rows of_a = Read(a), of_b = Read(b);
  const auto expect_all_is_there = [&] {
    EXPECT_TRUE(Read(a) == of_a && Read(b) == of_b);
    const auto again = Await([&] { return Train(*client_, b, 1, sequence); });
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(again->replayed);
    EXPECT_EQ(again->rows_updated, first->rows_updated);
  };
  ASSERT_NO_FATAL_FAILURE(LoseShards());
  ASSERT_NO_FATAL_FAILURE(expect_all_is_there());
  // A copy of the other one's is the same moment.
  const std::vector<std::string> of_other = Checkpoints("b");
  ASSERT_THAT(of_other, Contains(HasSubstr("auto-")));
  const std::string& other = of_other.front();
  for (const auto& [model, name] : {std::pair("a", std::string("one")), std::pair("b", other)}) {
    const std::string copy = absl::StrCat("copy-of-", model);
    const auto served = client_->ServeCheckpoint(model, {.name = name, .serve_as = copy});
    ASSERT_TRUE(served.ok()) << served.status();
  }
  EXPECT_EQ(*Table(*client_, *client_->DescribeModel("copy-of-a"), "users"),
            *Table(*client_, *client_->DescribeModel("copy-of-b"), "users"));
  // Each time, also when nothing has changed, and by whichever of them.
  ASSERT_NO_FATAL_FAILURE(ExpectCut("b", "two"));
  ASSERT_NO_FATAL_FAILURE(ExpectCut("a", "three"));
  ASSERT_NO_FATAL_FAILURE(LoseShards());
  ASSERT_NO_FATAL_FAILURE(expect_all_is_there());
}

TEST_F(SharedTablesLogTest, OneModelWithTwoViewsOfATableCutsItsLog) {
  ASSERT_NO_FATAL_FAILURE(Start("", "LOG fsync: ALWAYS"));
  auto model = client_->DeclareModel(OtherNames("two"));
  ASSERT_TRUE(model.ok()) << model.status();
  for (int i = 0; i < 2; ++i) {
    ASSERT_NO_FATAL_FAILURE(Step(*model, 2 * i));
    ASSERT_NO_FATAL_FAILURE(ExpectCut("two", absl::StrCat("at-", i)));
    ASSERT_NO_FATAL_FAILURE(Step(*model, 2 * i + 1));
    const std::vector<float> rows = *Table(*client_, *model, "writers");
    ASSERT_NO_FATAL_FAILURE(LoseShards());
    EXPECT_EQ(*Await([&] { return Table(*client_, *model, "writers"); }), rows);
  }
}

// The disk takes no checkpoint of it, and its rows are in that of a model that is gone.
TEST_F(SharedTablesLogTest, WhoJoinsLaterKeepsTheCheckpointThatItsRowsAreIn) {
  ASSERT_NO_FATAL_FAILURE(StartWithFaultyDisk());
  client::Model a = Declare("a");
  ASSERT_NO_FATAL_FAILURE(Step(a, 1));
  ASSERT_NO_FATAL_FAILURE(Save("a", "one"));
  faults_.Fail({"create", "checkpoints/c/.saving-*/manifest.json.tmp"}, ENOSPC, 1, true);
  client::Model c = Declare("c");
  ASSERT_NO_FATAL_FAILURE(Step(c, 2));
  ASSERT_NO_FATAL_FAILURE(Step(a, 3));
  EXPECT_FALSE(client_->SaveCheckpoint("a", {.name = "two"}).ok());
  ASSERT_NO_FATAL_FAILURE(Drop("a"));
  ASSERT_NO_FATAL_FAILURE(Step(c, 4));
  const Rows rows = Read(c);
  for (const std::string& name : Checkpoints("a")) {
    const absl::Status refused = client_->DeleteCheckpoint("a", name).status();
    EXPECT_THAT(refused.ToString(), HasSubstr("FAILED_PRECONDITION: checkpoint"));
    EXPECT_THAT(refused.ToString(), HasSubstr("what model \"c\" shares"));
  }
  ASSERT_NO_FATAL_FAILURE(LoseShards());
  EXPECT_EQ(Read(c), rows);
  faults_.Lift();
  ASSERT_NO_FATAL_FAILURE(Save("c", "three"));
  for (const std::string& name : Checkpoints("a")) {
    EXPECT_TRUE(client_->DeleteCheckpoint("a", name).ok()) << name;
  }
  ASSERT_NO_FATAL_FAILURE(LoseShards());
  EXPECT_EQ(Read(c), rows);
}

// Also where nothing has changed since, and another model's checkpoint cuts the log.
TEST_F(SharedTablesLogTest, WhoJoinsLaterKeepsTheSavedRowsOfAModelThatGoes) {
  ASSERT_NO_FATAL_FAILURE(StartWithFaultyDisk());
  client::Model a = Declare("a");
  ASSERT_NO_FATAL_FAILURE(Step(a, 1));
  ASSERT_NO_FATAL_FAILURE(Save("a", "one"));
  faults_.Fail({"create", "checkpoints/c/.saving-*/manifest.json.tmp"}, ENOSPC, 1, true);
  const client::Model c = Declare("c");
  const Rows rows = Read(c);
  ASSERT_NO_FATAL_FAILURE(Drop("a"));
  auto lonely = client_->DeclareModel(LonelyModel("lonely"));
  ASSERT_TRUE(lonely.ok()) << lonely.status();
  for (const int step : {2, 3}) {
    ASSERT_NO_FATAL_FAILURE(Step(*lonely, step));
    ASSERT_NO_FATAL_FAILURE(Save("lonely", absl::StrCat("save-", step)));
  }
  ASSERT_NO_FATAL_FAILURE(LoseShards());
  EXPECT_EQ(Read(c), rows);
}

// The log still has its record of a checkpoint that is gone, for another model's sake.
TEST_F(SharedTablesLogTest, AModelThatIsGoneNeedsNoCheckpointIfOneThatStaysHasANewer) {
  ASSERT_NO_FATAL_FAILURE(StartWithFaultyDisk());
  faults_.Fail({"create", "checkpoints/kept#/.saving-*/manifest.json.tmp"}, ENOSPC, 1, true);
  auto kept = client_->DeclareModel(LonelyModel("kept1"));
  ASSERT_TRUE(kept.ok()) << kept.status();
  ASSERT_NO_FATAL_FAILURE(Step(*kept, 1));
  client::Model a = Declare("a"), b = Declare("b");
  ASSERT_NO_FATAL_FAILURE(Step(a, 2));
  ASSERT_NO_FATAL_FAILURE(Save("a", "one"));
  ASSERT_NO_FATAL_FAILURE(Drop("a"));
  ASSERT_NO_FATAL_FAILURE(Step(b, 3));
  ASSERT_NO_FATAL_FAILURE(Save("b", "two"));
  for (const std::string& name : Checkpoints("a")) {
    EXPECT_TRUE(client_->DeleteCheckpoint("a", name).ok()) << name;
  }
  const client::Model c = Declare("kept2");
  const Rows of_b = Read(b), of_c = Read(c);
  ASSERT_NO_FATAL_FAILURE(LoseShards());
  EXPECT_EQ(Read(b), of_b);
  EXPECT_EQ(Read(c), of_c);
}

// One model whose checkpoints the disk does not take keeps the log of all from the beginning on: it
// has what others did before their checkpoints, and one that is gone before that of those that
// stay.
TEST_F(SharedTablesLogTest, ALogThatIsKeptForAnotherModelMakesNoChangeTwice) {
  ASSERT_NO_FATAL_FAILURE(StartWithFaultyDisk());
  faults_.Fail({"create", "checkpoints/kept/.saving-*/manifest.json.tmp"}, ENOSPC, 1, true);
  auto kept = client_->DeclareModel(LonelyModel("kept"));
  ASSERT_TRUE(kept.ok()) << kept.status();
  ASSERT_NO_FATAL_FAILURE(Step(*kept, 1));
  const uint64_t oldest = OldestSegment(0);
  client::Model a = Declare("a"), c = Declare("c");
  ASSERT_NO_FATAL_FAILURE(Step(a, 2));
  ASSERT_NO_FATAL_FAILURE(Step(c, 3));
  ASSERT_NO_FATAL_FAILURE(Drop("c"));
  ASSERT_NO_FATAL_FAILURE(Step(a, 4));
  ASSERT_NO_FATAL_FAILURE(Save("a", "one"));
  client::Model b = Declare("b");
  ASSERT_NO_FATAL_FAILURE(Step(b, 5));
  ASSERT_NO_FATAL_FAILURE(Step(a, 6));
  ASSERT_NO_FATAL_FAILURE(Save("b", "two"));
  ASSERT_NO_FATAL_FAILURE(Step(b, 7));
  const Rows of_a = Read(a), of_b = Read(b), of_kept = Read(*kept);
  EXPECT_EQ(OldestSegment(0), oldest);
  for (int life = 0; life < 2; ++life) {
    ASSERT_NO_FATAL_FAILURE(LoseShards());
    EXPECT_EQ(Read(a), of_a);
    EXPECT_EQ(Read(b), of_b);
    EXPECT_EQ(Read(*kept), of_kept);
  }
}

// The checkpoint of one model after the other is refused by the disk: there is none of either, the
// log goes on from where it was, and the next save is whole.
TEST_F(SharedTablesLogTest, ADiskThatRefusesOneOfTheCheckpointsHasNoneOfThem) {
  ASSERT_NO_FATAL_FAILURE(StartWithFaultyDisk());
  client::Model a = Declare("a"), b = Declare("b");
  // Those that come by themselves.
  ASSERT_TRUE(Eventually([&] { return !Checkpoints("b").empty(); }));
  const FileCall calls[] = {{"create", "checkpoints/a/.saving-*/manifest.json.tmp"},
                            {"rename", "checkpoints/a/.saving-*"},
                            {"create", "checkpoints/b/.saving-*/manifest.json.tmp"}};
  int saves = 0;
  for (const FileCall& call : calls) {
    SCOPED_TRACE(absl::StrCat(call.call, " ", call.path));
    ASSERT_NO_FATAL_FAILURE(Step(a, 1));
    const auto of_a = Checkpoints("a"), of_b = Checkpoints("b");
    faults_.Fail(call, ENOSPC, 1, /*lasting=*/true);
    const absl::Status refused = client_->SaveCheckpoint("a", {.name = "refused"}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
    faults_.Lift();
    EXPECT_EQ(Checkpoints("a"), of_a);
    EXPECT_EQ(Checkpoints("b"), of_b);
    ASSERT_NO_FATAL_FAILURE(Step(b, 2));
    const Rows rows = Read(a);
    ASSERT_NO_FATAL_FAILURE(LoseShards());
    EXPECT_EQ(Read(a), rows);
    ASSERT_NO_FATAL_FAILURE(ExpectCut("a", absl::StrCat("whole-", ++saves)));
  }
}

struct Kill {
  std::string process, failpoint;
};
class KilledSaveTest : public SharedTablesLogTest, public ::testing::WithParamInterface<Kill> {
 protected:
  // What is trained is the same, whoever dies.
  std::vector<Rows> Story(const Kill& kill) {
    std::vector<Rows> rows;
    client::Model a = Declare("a"), b = Declare("b");
    Step(a, 1);
    const uint64_t sequence = client_->NextSequence();
    const auto made = Await([&] { return Train(*client_, b, 2, sequence); });
    EXPECT_TRUE(made.ok()) << made.status();
    if (!kill.process.empty()) SaveUntilItDies(kill);
    Step(a, 3);
    Step(b, 4);
    const auto expect_all_is_there = [&] {
      rows.push_back(Read(a));
      rows.push_back(Read(b));
      const auto again = Await([&] { return Train(*client_, b, 2, sequence); });
      EXPECT_TRUE(again.ok()) << again.status();
      EXPECT_TRUE(again->replayed);
      EXPECT_EQ(again->rows_updated, made->rows_updated);
    };
    if (!kill.process.empty()) LoseShards();
    expect_all_is_there();
    // One goes while the others stay, and the next checkpoint cuts the log of these.
    client::Model c = Declare("c");
    Step(c, 5);
    Drop("a");
    Step(b, 6);
    if (!kill.process.empty()) {
      ExpectCut("c", "last");
      LoseShards();
    }
    rows.push_back(Read(b));
    rows.push_back(Read(c));
    return rows;
  }
  void SaveUntilItDies(const Kill& kill) {
    client::ClientOptions options = cluster_->client_options();
    options.max_attempts = 1;
    std::unique_ptr<client::Client> victim;
    const bool is_shard = kill.process == "shard-1";
    ChildProcess* const process =
        is_shard ? cluster_->shard_process(1) : cluster_->coordinator_process(0);
    int saves = 0;
    ASSERT_TRUE(Eventually([&] {
      if (!process->Running()) return true;  // it may have saved by itself
      if (auto made = client::Client::Connect(options); victim == nullptr && made.ok()) {
        victim = *std::move(made);
      }
      if (victim == nullptr) return false;
      victim->SaveCheckpoint("a", {.name = absl::StrCat("s", ++saves)}).IgnoreError();
      return !process->Running();
    })) << "it did not come to its failpoint";
    ASSERT_TRUE((is_shard ? cluster_->RestartShard(1) : cluster_->RestartCoordinator(0)).ok());
  }
};

TEST_P(KilledSaveTest, LosesNothingOfAnyModel) {
  static std::vector<Rows> undisturbed;  // of the first case; it is the same for all
  if (undisturbed.empty()) {
    ASSERT_NO_FATAL_FAILURE(Start());
    undisturbed = Story({});
  }
  ASSERT_NO_FATAL_FAILURE(
      Start("", "LOG fsync: ALWAYS",
            {.coordinators = 2, .failpoints = {{GetParam().process, GetParam().failpoint}}}));
  client::ClientOptions options = cluster_->client_options();
  options.addresses = {cluster_->address(1)};
  auto other = client::Client::Connect(options);
  ASSERT_TRUE(other.ok()) << other.status();
  client_ = *std::move(other);
  EXPECT_TRUE(Story(GetParam()) == undisturbed);
}

INSTANTIATE_TEST_SUITE_P(Steps, KilledSaveTest,
                         ::testing::Values(Kill{"coordinator-0", "save.changes_wait=die@3"},
                                           Kill{"coordinator-0", "save.files_are_here=die@2"},
                                           Kill{"coordinator-0", "save.manifest_is_written=die@4"},
                                           // Of two checkpoints of a save, the first one is there.
                                           Kill{"coordinator-0", "save.is_renamed=die@4"},
                                           Kill{"coordinator-0", "save.is_renamed=die@5"},
                                           Kill{"coordinator-0", "save.is_a_checkpoint=die@3"},
                                           Kill{"shard-1", "save.rows_are_here=die@3"},
                                           Kill{"shard-1", "save.is_a_checkpoint_now=die@3"}));

// The log of the two models has all that the third one ever did.
TEST_F(SharedTablesLogTest, CheckpointsOfOtherModelsMayGoAlthoughTheLogStays) {
  ASSERT_NO_FATAL_FAILURE(Start("", "LOG fsync: ALWAYS"));
  client::Model a = Declare("a"), b = Declare("b");
  auto lonely = client_->DeclareModel(LonelyModel("lonely"));
  ASSERT_TRUE(lonely.ok()) << lonely.status();
  const auto save = [&](const std::string& name) { Save("lonely", name); };
  const auto is_deleted = [&](const std::string& name) {
    ASSERT_TRUE(client_->DeleteCheckpoint("lonely", name).ok());
  };
  ASSERT_NO_FATAL_FAILURE(Step(*lonely, 1));
  ASSERT_NO_FATAL_FAILURE(save("one"));
  ASSERT_NO_FATAL_FAILURE(Step(*lonely, 2));
  ASSERT_NO_FATAL_FAILURE(Step(a, 3));
  ASSERT_TRUE(client_->RestoreCheckpoint("lonely", {.name = "one"}).ok());
  lonely = client_->DescribeModel("lonely");
  ASSERT_TRUE(lonely.ok()) << lonely.status();
  ASSERT_NO_FATAL_FAILURE(Step(*lonely, 4));
  ASSERT_NO_FATAL_FAILURE(Step(b, 5));
  ASSERT_NO_FATAL_FAILURE(save("two"));
  // It was restored from there, but goes on from the newer one.
  ASSERT_NO_FATAL_FAILURE(is_deleted("one"));
  ASSERT_NO_FATAL_FAILURE(Step(*lonely, 6));
  const Rows shared = Read(a), own = Read(*lonely);
  ASSERT_NO_FATAL_FAILURE(LoseShards());
  EXPECT_EQ(Read(*lonely), own);
  EXPECT_EQ(Read(a), shared);
  ASSERT_NO_FATAL_FAILURE(Drop("lonely"));
  ASSERT_NO_FATAL_FAILURE(is_deleted("two"));
  ASSERT_NO_FATAL_FAILURE(LoseShards());
  EXPECT_EQ(Read(a), shared);
  EXPECT_EQ(Read(b).users, shared.users);
  // Under the same name, from the beginning.
  lonely = Await([&] { return client_->DeclareModel(LonelyModel("lonely")); });
  ASSERT_TRUE(lonely.ok()) << lonely.status();
  EXPECT_NE(Read(*lonely), own);
}

}  // namespace shared_tables_log_test
}  // namespace emberd::testing
