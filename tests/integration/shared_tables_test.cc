// Models that share a table, on a cluster of processes: both see the changes of each, the rows are
// there once and go with the last model.
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

namespace emberd::testing {
namespace shared_tables_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

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

// Would catch: an update that is made twice in rows that another model has kept, for it was
// forgotten when its own model was dropped.
TEST_F(SharedTablesTest, WhatWasMadeInRowsThatStayIsNotMadeAgain) {
  ASSERT_NO_FATAL_FAILURE(Start());
  client::Model a = Declare("a"), b = Declare("b");
  const uint64_t sequence = client_->NextSequence();
  const auto first = Train(*client_, b, 1, sequence);
  ASSERT_TRUE(first.ok()) << first.status();
  const std::vector<float> trained = Read(a).users;
  ASSERT_NO_FATAL_FAILURE(Drop("b"));
  b = Declare("b");
  const auto again = Train(*client_, b, 1, sequence);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->replayed);
  EXPECT_EQ(Read(a).users, trained);
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
      const absl::Status status = client_->ReadRows(b, table, {-1}).status();
      EXPECT_THAT(std::string(status.message()), HasSubstr("table '" + table + "' has ids 0 .. "));
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
      const client::ApplyOptions options = {.hyperparameters = {{"", {{"learning_rate", 0.5}}}}};
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
