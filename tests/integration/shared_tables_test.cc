// Models that share a table, on a cluster of processes: both see the changes of each, the rows are
// there once and go with the last model, and a kill of a shard that has a log loses nothing of what
// any of the models did, also such as were dropped, though one checkpoint cuts the log of all. A
// log that begins with a checkpoint of one model would make the changes of the other twice, and one
// that is cut after a drop would lose them: the rows would differ from those of a cluster that
// nobody disturbs.
#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/temp_dir.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"
#include "tests/testing/file_faults.h"

namespace emberd::testing {
namespace shared_tables_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr int64_t kRows = 300;
constexpr int kDim = 8;
constexpr int64_t kSamples = 48;

// Table "users" has the resource; "own" is the model's.
std::string SharingModel(const std::string& name, const std::string& users = "",
                         const std::string& rest = "") {
  return absl::StrCat(
      "name: '", name, "' seed: 5 enable_variable_deduplication: true ", rest,
      " tables { name: 'own' vocabulary_size: 100 embedding_dim: 8 }"
      " tables { name: 'users' vocabulary_size: ",
      kRows, " embedding_dim: ", kDim,
      " combiner: SUM resource { container: 'ctr' name: 'users' } ", users,
      " }"
      " features { name: 'own' table: 'own' } features { name: 'user' table: 'users' }");
}

// As the others, but with all tables for itself.
std::string LonelyModel(const std::string& name) {
  std::string model = SharingModel(name);
  const std::string resource = " resource { container: 'ctr' name: 'users' } ";
  return model.erase(model.find(resource), resource.size());
}

// As SharingModel, but the shared table has another name, and two of them.
std::string OtherNames(const std::string& name) {
  const std::string table = absl::StrCat(" vocabulary_size: ", kRows, " embedding_dim: ", kDim,
                                         " resource { container: 'ctr' name: 'users' } combiner: ");
  return absl::StrCat("name: '", name, "' seed: 5 enable_variable_deduplication: true",
                      " tables { name: 'own' vocabulary_size: 100 embedding_dim: 8 }"
                      " tables { name: 'readers'",
                      table, "SUM } tables { name: 'writers'", table, "MEAN }",
                      " features { name: 'own' table: 'own' }"
                      " features { name: 'user' table: 'readers' }"
                      " features { name: 'writer' table: 'writers' }");
}

// `sequence`: of an update that may be there; 0: a new one.
absl::StatusOr<client::ApplyResult> Train(client::Client& client, const client::Model& model,
                                          uint64_t seed, uint64_t sequence = 0) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> users(2 * kSamples), own(kSamples);
  for (int64_t& id : users) id = static_cast<int64_t>(random() % kRows);
  for (int64_t& id : own) id = static_cast<int64_t>(random() % 100);
  std::vector<client::FeatureIds> features = {{"user", client::DenseIds{users, 2}},
                                              {"own", client::DenseIds{own, 1}}};
  if (model.FindFeature("writer") != nullptr) {
    features.push_back({"writer", client::DenseIds{own, 1}});
  }
  auto found = client.Lookup(model, features);
  if (!found.ok()) return found.status();
  // What was looked up goes in, so that a difference of one bit stays.
  std::vector<std::vector<float>> values;
  std::vector<client::FeatureGradient> gradients;
  for (const client::Activation& activation : found->activations) {
    std::vector<float>& of =
        values.emplace_back(activation.values.begin(), activation.values.end());
    for (float& g : of) g = g / 2 + static_cast<float>(random() % 256) / 256;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    gradients.push_back({found->activations[i].feature, values[i], kSamples});
  }
  client::ApplyOptions options;
  options.sequence = sequence;
  return client.ApplyGradients(model, found->batch, gradients, options);
}

absl::StatusOr<std::vector<float>> Table(client::Client& client, const client::Model& model,
                                         const std::string& table, const std::string& slot = "") {
  std::vector<float> all;
  client::ExportOptions options;
  options.slot = slot;
  const absl::Status status = client.ExportTable(
      model, table,
      [&](int64_t, absl::Span<const float> values, int64_t) {
        all.insert(all.end(), values.begin(), values.end());
        return absl::OkStatus();
      },
      options);
  if (!status.ok()) return status;
  return all;
}

// Weights and slots of what a model has.
struct Rows {
  std::vector<float> users, accumulators, own;
  bool operator==(const Rows&) const = default;
};

class SharedTablesTest : public ::testing::Test {
 protected:
  void Start(const std::string& config = "", const std::string& durability = "",
             ClusterOptions options = {}) {
    const std::string storage = durability.empty()
                                    ? ""
                                    : absl::StrCat("storage { directory: '", storage_.path(),
                                                   "' durability: ", durability, " }");
    options.shards = 2;
    options.config = absl::StrCat(config, " ", storage);
    auto cluster = Cluster::Start(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    client_ = cluster_->Connect();
    ASSERT_NE(client_, nullptr);
  }

  void StartWithFaultyDisk() {
    Start("", "LOG fsync: ALWAYS", {.file_faults = faults_.environment()});
  }

  client::Model Declare(const std::string& name) {
    auto model = client_->DeclareModel(SharingModel(name));
    EXPECT_TRUE(model.ok()) << model.status();
    return model.value_or(client::Model());
  }
  void Step(const client::Model& model, uint64_t seed) {
    const absl::Status status = Await([&] { return Train(*client_, model, seed); }).status();
    ASSERT_TRUE(status.ok()) << status;
  }
  Rows Read(const client::Model& model) {
    const auto table = [&](const std::string& name, const std::string& slot) {
      auto rows = Await([&] { return Table(*client_, model, name, slot); });
      EXPECT_TRUE(rows.ok()) << rows.status();
      return rows.value_or(std::vector<float>());
    };
    return {table("users", ""), table("users", "accumulator"), table("own", "")};
  }
  int64_t TableBytes() {
    auto status = client_->GetStatus();
    EXPECT_TRUE(status.ok()) << status.status();
    int64_t bytes = 0;
    for (const client::ShardStatus& shard : status->shards) bytes += shard.table_bytes;
    return bytes;
  }
  void Drop(const std::string& name) {
    auto dropped = client_->DropModel(name);
    ASSERT_TRUE(dropped.ok()) << dropped.status();
    EXPECT_TRUE(*dropped);
  }
  void LoseShards() {
    for (const int shard : {0, 1}) cluster_->KillShard(shard);
    for (const int shard : {0, 1}) ASSERT_TRUE(cluster_->RestartShard(shard).ok());
  }
  void Save(const std::string& model, const std::string& name) {
    const auto saved = Await([&] { return client_->SaveCheckpoint(model, {.name = name}); });
    ASSERT_TRUE(saved.ok()) << saved.status();
  }
  std::vector<std::string> Checkpoints(const std::string& model) {
    std::vector<std::string> names;
    const auto list = client_->ListCheckpoints(model);
    EXPECT_TRUE(list.ok()) << list.status();
    for (const client::CheckpointInfo& info : list->checkpoints) names.push_back(info.name);
    return names;
  }
  // Of the log of a shard.
  uint64_t OldestSegment(int shard) const {
    uint64_t oldest = std::numeric_limits<uint64_t>::max();
    const std::string folder = storage_.Path(absl::StrCat("shard-000", shard, "/log"));
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
      uint64_t segment = 0;
      if (file.path().extension() != ".records") continue;
      EXPECT_TRUE(absl::SimpleAtoi(file.path().stem().string(), &segment)) << file.path();
      oldest = std::min(oldest, segment);
    }
    return oldest;
  }
  // Saves the model, after which neither log has what came before.
  void ExpectCut(const std::string& model, const std::string& name) {
    const uint64_t before[2] = {OldestSegment(0), OldestSegment(1)};
    ASSERT_NO_FATAL_FAILURE(Save(model, name));
    for (const int shard : {0, 1}) EXPECT_GT(OldestSegment(shard), before[shard]) << shard;
  }
  absl::Status DeclareOther(const std::string& users, const std::string& rest = "") {
    return client_->DeclareModel(SharingModel("other", users, rest)).status();
  }

  const TempDir storage_ = *TempDir::Create(), control_ = *TempDir::Create();
  FileFaults faults_{control_.Path("faults"), storage_.path()};
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> client_;
};

TEST_F(SharedTablesTest, RowsAreThereOnceAndGoWithTheLastModel) {
  ASSERT_NO_FATAL_FAILURE(Start());
  std::vector<float> initial;
  for (const bool first_goes_first : {true, false}) {
    client::Model a = Declare("a");
    const int64_t bytes_of_one = TableBytes();
    if (first_goes_first) initial = Read(a).users;
    EXPECT_EQ(Read(a).users, initial);
    client::Model b = Declare("b");
    // Only the tables of its own are added.
    const int64_t own = TableBytes() - bytes_of_one;
    EXPECT_GT(own, 0);
    EXPECT_LT(own, bytes_of_one / 2);
    ASSERT_NO_FATAL_FAILURE(Step(a, 1));
    ASSERT_NO_FATAL_FAILURE(Step(b, 2));
    ASSERT_NO_FATAL_FAILURE(Step(a, 3));
    const std::vector<float> trained = Read(a).users;
    EXPECT_NE(trained, initial);
    EXPECT_EQ(Read(b).users, trained);
    EXPECT_EQ(Read(b).accumulators, Read(a).accumulators);
    EXPECT_NE(Read(b).own, Read(a).own);
    ASSERT_NO_FATAL_FAILURE(Drop(first_goes_first ? "a" : "b"));
    EXPECT_EQ(Read(first_goes_first ? b : a).users, trained);
    EXPECT_EQ(TableBytes(), bytes_of_one);
    ASSERT_NO_FATAL_FAILURE(Drop(first_goes_first ? "b" : "a"));
    EXPECT_EQ(TableBytes(), 0);
  }
}

TEST_F(SharedTablesTest, WhatCannotBeSharedIsRefusedBeforeAnythingExists) {
  ASSERT_NO_FATAL_FAILURE(Start());
  client::Model a = Declare("a");
  const int64_t bytes = TableBytes();
  const auto refused = [&](const std::string& users, const std::string& rest, absl::StatusCode code,
                           const std::string& message) {
    const absl::Status status = DeclareOther(users, rest);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
    EXPECT_EQ(TableBytes(), bytes);
  };
  refused("optimizer { adagrad { initial_accumulator: 0.5 } }", "",
          absl::StatusCode::kAlreadyExists,
          "tables[1] \"users\": resource \"ctr/users\" is held by model 'a', and the tables must "
          "agree; first difference: optimizer.adagrad.initial_accumulator: 0.1 in the declared "
          "model, 0.5 in the requested one");
  refused("storage_dtype: FLOAT16", "", absl::StatusCode::kAlreadyExists,
          "storage_dtype: FLOAT32 in the declared model, FLOAT16 in the requested one");
  refused("", "plan { groups { tables: 'users' } }", absl::StatusCode::kInvalidArgument,
          "The following flags are incompatible: plan.groups[0].tables[0] \"users\" and "
          "enable_variable_deduplication. Only enable one of the flags.");
  Declare("b");
  const absl::Status reset = client_->ResetModel("a");
  EXPECT_EQ(reset.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(reset.message()),
              AllOf(HasSubstr("model 'a' shares resource \"ctr/users\" with model 'b'"),
                    HasSubstr("emberctl model drop b")));
  ASSERT_NO_FATAL_FAILURE(Step(a, 1));
  ASSERT_NO_FATAL_FAILURE(Drop("b"));
  ASSERT_TRUE(client_->ResetModel("a").ok());
}

// A coordinator dies when one shard has made an update and the other only holds it, and its model
// is dropped through the other coordinator.
TEST_F(SharedTablesTest, AHalfMadeUpdateIsFinishedBeforeItsModelGoes) {
  std::vector<float> rows[2];
  for (const bool dies : {false, true}) {
    const std::string failpoint = dies ? "update.word_is_said=die:300@1" : "";
    auto cluster = Cluster::Start(
        {.shards = 2, .coordinators = 2, .failpoints = {{"coordinator-1", failpoint}}});
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    absl::StatusOr<std::unique_ptr<client::Client>> through[2];
    for (const int i : {0, 1}) {
      client::ClientOptions options = (*cluster)->client_options();
      options.addresses = {(*cluster)->address(i)};
      through[i] = client::Client::Connect(options);
      ASSERT_TRUE(through[i].ok()) << through[i].status();
    }
    auto a = (*through[1])->DeclareModel(SharingModel("a"));
    auto b = (*through[1])->DeclareModel(SharingModel("b"));
    ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
    EXPECT_EQ(Train(**through[1], *a, 1).ok(), !dies);
    const auto dropped = (*through[0])->DropModel("a");
    ASSERT_TRUE(dropped.ok()) << dropped.status();
    b = (*through[0])->DescribeModel("b");
    ASSERT_TRUE(b.ok()) << b.status();
    const auto table = Table(**through[0], *b, "users");
    ASSERT_TRUE(table.ok()) << table.status();
    rows[dies] = *table;
  }
  EXPECT_EQ(rows[true], rows[false]);
}

TEST_F(SharedTablesTest, AShardThatIsStartedAgainWithoutALogLosesAllModels) {
  ASSERT_NO_FATAL_FAILURE(Start());
  client::Model a = Declare("a"), b = Declare("b");
  ASSERT_NO_FATAL_FAILURE(Step(a, 1));
  cluster_->KillShard(1);
  ASSERT_TRUE(cluster_->RestartShard(1).ok());
  for (const client::Model& model : {a, b}) {
    const absl::Status status =
        Await([&] { return Train(*client_, model, 2).status(); }, absl::IsDataLoss);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  }
  ASSERT_NO_FATAL_FAILURE(Drop("b"));
  // It would begin with trained rows on one shard and initial ones on the other.
  const absl::Status joined = client_->DeclareModel(SharingModel("b")).status();
  EXPECT_EQ(joined.code(), absl::StatusCode::kFailedPrecondition) << joined;
  EXPECT_THAT(std::string(joined.message()), HasSubstr("model 'a', which some shards have lost"));
  ASSERT_TRUE(client_->ResetModel("a").ok());
  ASSERT_NO_FATAL_FAILURE(Step(Declare("b"), 3));
}

// The same steps on a cluster with logs whose shards are killed again and again, and on one
// without.
TEST_F(SharedTablesTest, KilledShardsComeBackWithWhatAllModelsDid) {
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

TEST_F(SharedTablesTest, ACheckpointComesBackIntoAModelThatIsAlone) {
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

TEST_F(SharedTablesTest, OneCheckpointCutsTheLogOfAllWhoShare) {
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

TEST_F(SharedTablesTest, OneModelWithTwoViewsOfATableCutsItsLog) {
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
TEST_F(SharedTablesTest, WhoJoinsLaterKeepsTheCheckpointThatItsRowsAreIn) {
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

// One model whose checkpoints the disk does not take keeps the log of all from the beginning on: it
// has what others did before their checkpoints, and one that is gone before that of those that
// stay.
TEST_F(SharedTablesTest, ALogThatIsKeptForAnotherModelMakesNoChangeTwice) {
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
TEST_F(SharedTablesTest, ADiskThatRefusesOneOfTheCheckpointsHasNoneOfThem) {
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
class KilledSaveTest : public SharedTablesTest, public ::testing::WithParamInterface<Kill> {
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
    auto victim = client::Client::Connect(options);
    ASSERT_TRUE(victim.ok()) << victim.status();
    const bool is_shard = kill.process == "shard-1";
    ChildProcess* const process =
        is_shard ? cluster_->shard_process(1) : cluster_->coordinator_process(0);
    int saves = 0;
    ASSERT_TRUE(Eventually([&] {
      if (!process->Running()) return true;
      (*victim)->SaveCheckpoint("a", {.name = absl::StrCat("s", ++saves)}).IgnoreError();
      return !process->Running();
    })) << "it did not come to its failpoint";
    ASSERT_TRUE((is_shard ? cluster_->RestartShard(1) : cluster_->RestartCoordinator(0)).ok());
  }
};

TEST_P(KilledSaveTest, LosesNothingOfAnyModel) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const std::vector<Rows> undisturbed = Story({});
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
TEST_F(SharedTablesTest, CheckpointsOfOtherModelsMayGoAlthoughTheLogStays) {
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

TEST_F(SharedTablesTest, WithoutTheOptionEachTableHasACopy) {
  ASSERT_NO_FATAL_FAILURE(Start());
  client::Model a = Declare("a");
  std::string without = SharingModel("other");
  without.replace(without.find("true"), 4, "false");
  const auto other = client_->DeclareModel(without);
  ASSERT_TRUE(other.ok()) << other.status();
  const std::vector<float> initial = Read(*other).users;
  EXPECT_EQ(Read(a).users, initial);
  ASSERT_NO_FATAL_FAILURE(Step(a, 1));
  EXPECT_NE(Read(a).users, initial);
  EXPECT_EQ(Read(*other).users, initial);
}

// What rows that nobody touched begin with must not change with the model that made them, nor in a
// checkpoint, which does not hold them.
TEST_F(SharedTablesTest, OneTableHasManyNamesAndBeginsAsItsFirstModelSays) {
  std::vector<float> initial, trained;
  for (const bool killed : {false, true}) {
    ASSERT_NO_FATAL_FAILURE(killed ? Start("", "LOG fsync: ALWAYS") : Start());
    client::Model a = Declare("a");
    if (!killed) initial = Read(a).users;
    auto declare = [&](const std::string& name) {
      auto model = client_->DeclareModel(OtherNames(name));
      EXPECT_TRUE(model.ok()) << model.status();
      return model.value_or(client::Model());
    };
    client::Model b = declare("b");
    EXPECT_EQ(declare("b").id, b.id);
    EXPECT_EQ(b.tables.size(), 3);
    EXPECT_EQ(b.FindTable("writers")->stack, b.FindTable("readers")->stack);
    for (const std::string table : {"readers", "writers"}) {
      EXPECT_EQ(*Table(*client_, b, table), initial) << table;
    }
    ASSERT_NO_FATAL_FAILURE(Step(a, 1));
    ASSERT_NO_FATAL_FAILURE(Step(b, 2));
    const std::vector<float> both = Read(a).users;
    EXPECT_EQ(*Table(*client_, b, "writers"), both);
    ASSERT_NO_FATAL_FAILURE(Drop("a"));
    if (killed) {
      ASSERT_NO_FATAL_FAILURE(LoseShards());
      EXPECT_EQ(*Await([&] { return Table(*client_, b, "readers"); }), both);
      ASSERT_TRUE(client_->SaveCheckpoint("b", {.name = "one"}).ok());
      ASSERT_TRUE(client_->ServeCheckpoint("b", {.name = "one", .serve_as = "copy"}).ok());
      const auto copy = client_->DescribeModel("copy");
      ASSERT_TRUE(copy.ok()) << copy.status();
      ASSERT_NO_FATAL_FAILURE(Step(b, 3));
      for (const std::string table : {"readers", "writers"}) {
        EXPECT_EQ(*Table(*client_, *copy, table), both) << table;
      }
      ASSERT_TRUE(client_->RestoreCheckpoint("b", {.name = "one"}).ok());
      b = *client_->DescribeModel("b");
    }
    EXPECT_EQ(*Table(*client_, b, "writers"), both);
    EXPECT_EQ(declare("b").id, b.id);
    if (!killed) trained = both;
    EXPECT_EQ(both, trained);
    EXPECT_NE(both, initial);
  }
}

// Of one table with both features, trained with the same ids and gradients.
TEST_F(SharedTablesTest, GradientsOfTwoNamesMakeOneUpdate) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const std::string resource = " resource { name: 'r' }";
  const auto model = [&](const std::string& name, bool two) {
    const auto table = [&](const std::string& table) {
      return absl::StrCat("tables { name: '", table, "' vocabulary_size: 40 embedding_dim: 8",
                          two ? resource : "", " } ");
    };
    return absl::StrCat("name: '", name, "' ", table("t"), two ? table("u") : "",
                        "features { name: 'f' table: 't' } features { name: 'g' table: '",
                        two ? "u" : "t",
                        "' } enable_variable_deduplication: ", two ? "true" : "false");
  };
  std::vector<float> weights[2], accumulators[2];
  for (const bool two : {false, true}) {
    auto declared = client_->DeclareModel(model(two ? "two" : "one", two));
    ASSERT_TRUE(declared.ok()) << declared.status();
    const std::vector<int64_t> f = {1, 2, 3, 1}, g = {3, 3, 2, 9};
    for (int step = 0; step < 3; ++step) {
      auto found = client_->Lookup(*declared,
                                   {{"f", client::DenseIds{f, 2}}, {"g", client::DenseIds{g, 1}}});
      ASSERT_TRUE(found.ok()) << found.status();
      std::vector<std::vector<float>> values;
      for (const client::Activation& activation : found->activations) {
        values.emplace_back(activation.values.begin(), activation.values.end());
      }
      const client::ApplyOptions options = {
          .hyperparameters = {{two ? "u" : "t", {{"learning_rate", 0.5}}}}};
      const auto applied = client_->ApplyGradients(
          *declared, found->batch, {{"f", values[0], 2}, {"g", values[1], 4}}, options);
      ASSERT_TRUE(applied.ok()) << applied.status();
      EXPECT_EQ(applied->rows_updated, 4);
    }
    weights[two] = *Table(*client_, *declared, two ? "u" : "t");
    accumulators[two] = *Table(*client_, *declared, "t", "accumulator");
  }
  EXPECT_EQ(weights[0], weights[1]);
  EXPECT_EQ(accumulators[0], accumulators[1]);
}

TEST_F(SharedTablesTest, ModelsThatGoBackToCheckpointsOfTheirOwnShareNothing) {
  ASSERT_NO_FATAL_FAILURE(Start("", "CHECKPOINT"));
  Declare("a");
  const absl::Status joins = DeclareOther("");
  EXPECT_EQ(joins.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(joins.message()), HasSubstr("with storage.durability CHECKPOINT"));
}

}  // namespace shared_tables_test
}  // namespace emberd::testing
