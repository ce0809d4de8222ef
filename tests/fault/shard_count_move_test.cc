// `emberd up` with storage.durability LOG, started with another number of shards than before, and
// killed at every step of the move: the tables, the record of updates and the groups are those of
// before, also after the way back. Catches: a step that cannot be taken again, logs that are gone
// before others replace them, and half of the old logs among the new ones.
// Covers: server/launcher/shard_count.cc
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <signal.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "base/testing/paths.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/api.h"
#include "tests/testing/cluster.h"
#include "tests/testing/group_training.h"
#include "tests/testing/process.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace shard_count_move_test {

using ::testing::HasSubstr;

constexpr int64_t kSamples = 32;
constexpr uint64_t kSequence = 1000;
constexpr int64_t kGroupSteps = 3;

// Of two models: "mixed", and "group", which a group of one rank trains.
class ShardCountMoveTest : public ::testing::TestWithParam<bool> {
 protected:
  // Starts `emberd up` with 4 partitions, or so many SparseCores a shard.
  void Launch(int shards, int sparsecores = 0, const std::string& failpoint = "") {
    up_.reset();
    std::filesystem::remove(log_);
    const int each = sparsecores != 0 ? sparsecores : 4 / shards;
    // What a killed one leaves in its temporary folder goes with the test's.
    std::filesystem::create_directories(scratch_);
    std::vector<std::string> argv = {
        "/usr/bin/env",
        "TMPDIR=" + scratch_,
        "EMBERD_FAILPOINT=" + failpoint,
        BuildPath(failpoint.empty() ? "bin/emberd" : "tests/emberd_faulty"),
        "up",
        "--listen",
        "127.0.0.1:0",
        "--http",
        "",
        "--data",
        data_.path(),
        "--durability",
        "log"};
    if (GetParam()) argv.emplace_back("--processes");
    if (evicts_) {
      std::string config =
          absl::StrCat("sparsecores_per_shard: ", each, "\neviction { spill_folder: \"",
                       logs_.Path("spilled"), "\" }\ncoordinators { address: \"127.0.0.1:0\" }\n");
      for (int i = 0; i < shards; ++i) config += "shards { address: \"127.0.0.1:0\" }\n";
      std::ofstream(logs_.Path("config.textproto")) << config;
      argv.insert(argv.end(), {"--config", logs_.Path("config.textproto")});
    } else {
      argv.insert(argv.end(),
                  {"--shards", absl::StrCat(shards), "--sparsecores", absl::StrCat(each)});
    }
    auto process = StartProcess(argv, log_);
    ASSERT_TRUE(process.ok()) << process.status();
    up_ = *std::move(process);
  }
  // The same, until it serves.
  void Start(int shards, const std::string& failpoint = "") {
    ASSERT_NO_FATAL_FAILURE(Launch(shards, 0, failpoint));
    address_.clear();
    Eventually([&] {
      const std::string log = ReadFile(log_);
      if (!absl::StrContains(log, " pids=")) return !up_->Running();
      for (absl::string_view word : absl::StrSplit(log, absl::ByAnyChar(" \n"))) {
        if (absl::ConsumePrefix(&word, "coordinator=")) address_ = std::string(word);
        if (absl::ConsumePrefix(&word, "pids=")) pid_ = std::string(word.substr(0, word.find(',')));
      }
      return true;
    });
    ASSERT_FALSE(address_.empty()) << ReadFile(log_);
    for (const auto& [client, id] : {std::pair(&client_, ""), std::pair(&trainer_, "trainer")}) {
      auto connected = client::Client::Connect({.addresses = {address_}, .client_id = id});
      ASSERT_TRUE(connected.ok()) << connected.status();
      *client = *std::move(connected);
    }
  }
  // Until the process of the coordinator stands still.
  bool AwaitStandstill() {
    return Eventually(
        [&] { return absl::StrContains(ReadFile(absl::StrCat("/proc/", pid_, "/stat")), ") T "); });
  }
  void Kill() {
    up_->Signal(SIGKILL);
    up_->WaitFor(absl::InfiniteDuration());
  }
  void ExpectDiesAt(const std::string& failpoint, int shards) {
    SCOPED_TRACE(failpoint);
    ASSERT_NO_FATAL_FAILURE(Launch(shards, 0, failpoint + "=die"));
    ASSERT_TRUE(up_->WaitFor(kPatience)) << ReadFile(log_);
    EXPECT_EQ(up_->exit_status(), -SIGKILL) << ReadFile(log_);
  }

  // Ends at the start, and says so.
  void ExpectRefused(int shards, const std::string& why, int sparsecores = 0) {
    ASSERT_NO_FATAL_FAILURE(Launch(shards, sparsecores));
    ASSERT_TRUE(up_->WaitFor(kPatience)) << ReadFile(log_);
    EXPECT_EQ(up_->exit_status(), 1);
    EXPECT_THAT(ReadFile(log_), HasSubstr(why));
  }

  client::Model ModelOf(const std::string& name) {
    const auto model = Await([&] { return client_->DescribeModel(name); });
    EXPECT_TRUE(model.ok()) << model.status();
    return *model;
  }
  static std::string TablesOf(client::Client& client, const client::Model& mixed,
                              const client::Model& group) {
    return absl::StrCat(Digest(client, mixed).value_or("none"), " ",
                        Digest(client, group).value_or("none"));
  }
  std::string Tables() { return TablesOf(*client_, ModelOf("mixed"), ModelOf("group")); }
  void Train(int step) {
    const client::Model mixed = ModelOf("mixed");
    const absl::Status status = Await([&] { return TrainStep(*client_, mixed, step, kSamples); });
    ASSERT_TRUE(status.ok()) << status;
  }
  v1::GetLimitsResponse LimitsOf(const std::string& model) {
    v1::GetLimitsRequest request;
    request.set_model(model);
    v1::GetLimitsResponse limits;
    EXPECT_TRUE(Eventually([&] {
      return Call(&v1::AdminService::Stub::GetLimits, Api(address_), request, &limits).ok();
    }));
    return limits;
  }
  // The tables of a cluster that was never moved, after so many steps of "mixed".
  static std::string Undisturbed(int steps) {
    auto calm = Cluster::Start({.shards = 1, .sparsecores_per_shard = 4, .embedded = true});
    EXPECT_TRUE(calm.ok()) << calm.status();
    const auto client = (*calm)->Connect();
    const auto mixed = client->DeclareModel(MixedModel("mixed"));
    const auto group = client->DeclareModel(GroupModel("group", 0));
    EXPECT_TRUE(mixed.ok() && group.ok());
    for (int step = 0; step < steps; ++step) {
      EXPECT_TRUE(TrainStep(*client, *mixed, step, kSamples).ok());
    }
    auto stream = client->Train(*group, {.group = "g"});
    EXPECT_TRUE(stream.ok() && RunSteps(**stream, 0, 1, 0, kGroupSteps, false).ok());
    return TablesOf(*client, *mixed, *group);
  }

  const TempDir data_ = *TempDir::Create();
  const TempDir logs_ = *TempDir::Create();
  const std::string log_ = logs_.Path("log");
  const std::string scratch_ = logs_.Path("tmp");
  bool evicts_ = false;  // the cluster has `eviction`, so that models can be pinned
  std::unique_ptr<ChildProcess> up_;
  std::string address_;
  std::string pid_;  // of the coordinator
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<client::Client> trainer_;  // the same one in each life of the cluster
};

TEST_P(ShardCountMoveTest, GoesOnWhereverItIsKilled) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  const auto mixed = client_->DeclareModel(MixedModel("mixed"));
  const auto group = client_->DeclareModel(GroupModel("group", 0));
  ASSERT_TRUE(mixed.ok() && group.ok()) << mixed.status() << group.status();
  for (int step = 0; step < 3; ++step) ASSERT_NO_FATAL_FAILURE(Train(step));
  {
    auto stream = client_->Train(*group, {.group = "g"});
    ASSERT_TRUE(stream.ok()) << stream.status();
    ASSERT_TRUE(RunSteps(**stream, 0, 1, 0, kGroupSteps, false).ok());
  }
  // The last update, of which the trainer asks again later.
  const std::vector<OwnedIds> batch = MixedBatch(3, kSamples);
  const auto found = trainer_->Lookup(*mixed, Features(batch));
  ASSERT_TRUE(found.ok()) << found.status();
  const auto values = MixedGradients(3, *found);
  client::ApplyOptions options;
  options.sequence = kSequence;
  const auto apply = [&] {
    return trainer_->ApplyGradients(*mixed, found->batch, Gradients(*found, values), options);
  };
  const auto first = apply();
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string before = Tables();
  EXPECT_EQ(before, Undisturbed(4));
  ASSERT_NO_FATAL_FAILURE(Kill());

  for (const char* failpoint :
       {"move.models_are_saved", "move.checkpoints_count", "move.log_is_aside",
        "restore.rows_are_here", "move.models_are_restored", "move.is_over"}) {
    ASSERT_NO_FATAL_FAILURE(ExpectDiesAt(failpoint, 4));
  }
  ASSERT_NO_FATAL_FAILURE(Start(4));
  EXPECT_EQ(Tables(), before);
  const auto again = Await(apply);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->replayed);
  EXPECT_EQ(again->rows_updated, first->rows_updated);
  {
    const auto stream = client_->Train(ModelOf("group"), {.group = "g"});
    ASSERT_TRUE(stream.ok()) << stream.status();
    EXPECT_EQ((*stream)->next_step(), kGroupSteps);
  }
  EXPECT_EQ(Tables(), before);
  const std::string old = data_.Path("old-shards");
  EXPECT_TRUE(Eventually([&] { return !std::filesystem::exists(old); }));
  EXPECT_FALSE(std::filesystem::exists(data_.Path("moving")));
  ASSERT_NO_FATAL_FAILURE(Train(4));
  ASSERT_NO_FATAL_FAILURE(Kill());

  // Back again.
  ASSERT_NO_FATAL_FAILURE(Start(2));
  EXPECT_EQ(Tables(), Undisturbed(5));
  EXPECT_FALSE(std::filesystem::exists(data_.Path("shard-0002")));
  ASSERT_NO_FATAL_FAILURE(Train(5));
  ASSERT_NO_FATAL_FAILURE(Kill());
  ASSERT_NO_FATAL_FAILURE(Start(2));
  EXPECT_EQ(Tables(), Undisturbed(6));
}

TEST_P(ShardCountMoveTest, AnotherNumberOfPartitionsIsRefused) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  const auto mixed = client_->DeclareModel(MixedModel("mixed"));
  const auto group = client_->DeclareModel(GroupModel("group", 0));
  ASSERT_TRUE(mixed.ok() && group.ok()) << mixed.status() << group.status();
  ASSERT_NO_FATAL_FAILURE(Train(0));
  const std::string before = Tables();
  ASSERT_NO_FATAL_FAILURE(Kill());
  ASSERT_NO_FATAL_FAILURE(ExpectRefused(4, "(4 partitions)", /*sparsecores=*/2));
  EXPECT_THAT(ReadFile(log_), HasSubstr("--sparsecores 1"));
  EXPECT_THAT(ReadFile(log_), HasSubstr("move the folders shard-NNNN away"));
  // Of as many shards, too: they would serve nothing, and `emberd up --processes` would be ready.
  ASSERT_NO_FATAL_FAILURE(ExpectRefused(
      2, "(4 partitions), but 2 shards with 4 SparseCores each have 8", /*sparsecores=*/4));
  EXPECT_THAT(ReadFile(log_), HasSubstr("--sparsecores 2"));
  ASSERT_NO_FATAL_FAILURE(Start(2));
  EXPECT_EQ(Tables(), before);
}

// A disk that is not mounted looks like a shard that has lost its log. What was only being declared
// holds nothing up.
TEST_P(ShardCountMoveTest, AModelThatAShardHasLostIsNotMoved) {
  ASSERT_NO_FATAL_FAILURE(Start(2, "model.is_made=die@3"));
  for (const auto& model : {MixedModel("mixed"), GroupModel("group", 0)}) {
    ASSERT_TRUE(client_->DeclareModel(model).ok());
  }
  ASSERT_NO_FATAL_FAILURE(Train(0));
  const std::string before = Tables();
  client::ClientOptions options;
  options.addresses = {address_};
  options.max_attempts = 1;
  const auto impatient = client::Client::Connect(options);
  ASSERT_TRUE(impatient.ok()) << impatient.status();
  EXPECT_TRUE(absl::IsUnavailable((*impatient)->DeclareModel(MixedModel("begun")).status()));
  ASSERT_NO_FATAL_FAILURE(Kill());

  const std::string log = data_.Path("shard-0000");
  std::filesystem::rename(log, logs_.Path("elsewhere"));
  for (int i = 0; i < 2; ++i) {
    ASSERT_NO_FATAL_FAILURE(ExpectRefused(4, "is lost: shard 0 no longer has its rows"));
    EXPECT_THAT(ReadFile(log_), HasSubstr("2 shards with 2 SparseCores each can still be started"));
  }
  for (const char* name : {"moving", "old-shards"}) {
    EXPECT_FALSE(std::filesystem::exists(data_.Path(name))) << name;
  }
  std::filesystem::remove_all(log);
  std::filesystem::rename(logs_.Path("elsewhere"), log);
  ASSERT_NO_FATAL_FAILURE(Start(4));
  EXPECT_EQ(Tables(), before);
  EXPECT_TRUE(absl::IsNotFound(client_->DescribeModel("begun").status()));
}

// Its rows are in a checkpoint alone, which nobody restores after the move.
TEST_P(ShardCountMoveTest, AModelThatIsHalfRestoredIsNotMoved) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  for (const auto& model : {MixedModel("mixed"), GroupModel("group", 0)}) {
    ASSERT_TRUE(client_->DeclareModel(model).ok());
  }
  ASSERT_NO_FATAL_FAILURE(Train(0));
  const std::string before = Tables();
  ASSERT_TRUE(client_->SaveCheckpoint("mixed", {.name = "saved"}).ok());
  ASSERT_NO_FATAL_FAILURE(Kill());
  ASSERT_NO_FATAL_FAILURE(Start(2, "model.is_made=stop"));
  ModelOf("mixed");  // waits until it is served
  std::atomic<bool> over = false;
  std::thread restoring([&] {  // again where the coordinator is just saving the model
    while (!over) EXPECT_FALSE(client_->RestoreCheckpoint("mixed", {.name = "saved"}).ok());
  });
  EXPECT_TRUE(AwaitStandstill()) << ReadFile(log_);
  over = true;
  Kill();
  client_->CancelCalls();
  restoring.join();
  ASSERT_NO_FATAL_FAILURE(ExpectRefused(4, "model 'mixed': "));
  EXPECT_FALSE(std::filesystem::exists(data_.Path("moving")));

  ASSERT_NO_FATAL_FAILURE(Start(2));
  const auto restored =
      Await([&] { return client_->RestoreCheckpoint("mixed", {.name = "saved"}); });
  ASSERT_TRUE(restored.ok()) << restored.status();
  ASSERT_NO_FATAL_FAILURE(Kill());
  ASSERT_NO_FATAL_FAILURE(Start(4));
  EXPECT_EQ(Tables(), before);
}

TEST_P(ShardCountMoveTest, ModelsThatShareATableAreNotMoved) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  for (const char* name : {"a", "b"}) {
    const auto model = client_->DeclareModel(absl::StrCat(
        "name: '", name, "' enable_variable_deduplication: true",
        " tables { name: 't' vocabulary_size: 100 embedding_dim: 8 resource { name: 'r' } }",
        " features { name: 'f' table: 't' }"));
    ASSERT_TRUE(model.ok()) << model.status();
  }
  const auto before = Digest(*client_, ModelOf("b"));
  ASSERT_TRUE(before.ok()) << before.status();
  ASSERT_NO_FATAL_FAILURE(Kill());
  ASSERT_NO_FATAL_FAILURE(ExpectRefused(4, "share the tables of resource 'r'"));
  ASSERT_NO_FATAL_FAILURE(Start(2));
  ModelOf("a");  // waits until it is served
  // Another shard may still read its log.
  const auto dropped = Await([&] { return client_->DropModel("a"); });
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  ASSERT_NO_FATAL_FAILURE(Kill());
  ASSERT_NO_FATAL_FAILURE(Start(4));
  const auto after = Digest(*client_, ModelOf("b"));
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(*after, *before);
}

// A move that goes on by a file that says less than was written would drop models and their logs.
TEST_P(ShardCountMoveTest, ADamagedFileOfTheMoveIsRefused) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  for (const char* name : {"mixed", "other"}) {
    const auto model = client_->DeclareModel(MixedModel(name));
    ASSERT_TRUE(model.ok()) << model.status();
  }
  ASSERT_NO_FATAL_FAILURE(Train(0));
  const std::string before = TablesOf(*client_, ModelOf("mixed"), ModelOf("other"));
  ASSERT_NO_FATAL_FAILURE(Kill());
  ASSERT_NO_FATAL_FAILURE(ExpectDiesAt("move.checkpoints_count", 4));
  const std::string moving = data_.Path("moving");
  const std::string whole = ReadFile(moving);
  const size_t second = whole.rfind("models {");
  ASSERT_GT(second, whole.find("models {")) << whole;
  std::string changed = whole;
  changed.replace(changed.find("auto-"), 5, "save-");
  for (const std::string& damaged :
       {std::string(), whole.substr(0, second), changed, std::string("shards 0\npartitions 4\n")}) {
    SCOPED_TRACE(damaged);
    WriteFile(moving, damaged);
    ASSERT_NO_FATAL_FAILURE(ExpectRefused(4, moving + ": is damaged"));
    EXPECT_FALSE(std::filesystem::exists(data_.Path("old-shards")));
  }
  WriteFile(moving, whole);
  ASSERT_NO_FATAL_FAILURE(Start(4));
  EXPECT_EQ(TablesOf(*client_, ModelOf("mixed"), ModelOf("other")), before);
}

// What operators set is in no checkpoint, and in the file `moving` if the move is interrupted.
TEST_P(ShardCountMoveTest, KeepsLimitsAndPins) {
  evicts_ = true;
  ASSERT_NO_FATAL_FAILURE(Start(2));
  for (const char* name : {"mixed", "other"}) {
    const auto model = client_->DeclareModel(MixedModel(name));
    ASSERT_TRUE(model.ok()) << model.status();
  }
  v1::SetLimitsRequest set;
  set.set_model("mixed");
  const v1::GetLimitsResponse declared = LimitsOf("mixed");
  for (const v1::StackLimits& stack : declared.stacks()) {
    v1::StackLimit* const limit = set.add_limits();
    limit->set_stack(stack.stack());
    limit->set_max_ids_per_partition(107);
    limit->set_max_unique_ids_per_partition(7);
  }
  v1::SetLimitsResponse done;
  ASSERT_TRUE(Call(&v1::AdminService::Stub::SetLimits, Api(address_), set, &done).ok());
  v1::ChangeMemoryRequest pin;
  pin.set_operation(v1::ChangeMemoryRequest::PIN);
  pin.set_model("mixed");
  v1::ChangeMemoryResponse pinned;
  ASSERT_TRUE(Call(&v1::AdminService::Stub::ChangeMemory, Api(address_), pin, &pinned).ok());
  ASSERT_NO_FATAL_FAILURE(Kill());

  ASSERT_NO_FATAL_FAILURE(ExpectDiesAt("move.log_is_aside", 4));
  ASSERT_NO_FATAL_FAILURE(Start(4));
  for (const char* name : {"mixed", "other"}) {
    const v1::GetLimitsResponse limits = LimitsOf(name);
    EXPECT_GT(limits.stacks_size(), 0);
    for (const v1::StackLimits& stack : limits.stacks()) {
      EXPECT_EQ(stack.max_ids_per_partition() == 107, name == std::string("mixed")) << name;
      EXPECT_EQ(stack.max_unique_ids_per_partition() == 7, name == std::string("mixed")) << name;
    }
  }
  v1::GetStatusResponse status;
  EXPECT_TRUE(Eventually([&] {
    status.Clear();
    return Call(&v1::AdminService::Stub::GetStatus, Api(address_), v1::GetStatusRequest(), &status)
               .ok() &&
           std::all_of(status.shards().begin(), status.shards().end(), [](const auto& shard) {
             return shard.reachable() && !shard.log().recovering() &&
                    shard.memory().tables_size() > 0;
           });
  }));
  ASSERT_EQ(status.shards_size(), 4);
  for (const v1::ShardStatus& shard : status.shards()) {
    for (const v1::MemoryTable& table : shard.memory().tables()) {
      EXPECT_EQ(table.pinned(), table.model() == "mixed") << table.model();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, ShardCountMoveTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Processes" : "OneProcess"; });

}  // namespace shard_count_move_test
}  // namespace emberd::testing
