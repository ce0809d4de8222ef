// A unary update and an assignment are made on all shards or on none, and once, whatever happens to
// the coordinator that was asked: it dies or stops at every step on the way, and the trainer goes
// on through the other one. Rows count their updates, so a lost, doubled or half-made one shows.
#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"

namespace emberd::testing {
namespace {

constexpr int64_t kRows = 16;  // on both shards
constexpr char kTable[] = "t";
// Short, so that what is left over is decided on soon.
constexpr char kTimeouts[] = "timeouts { shard_call_ms: 3000 }";

client::ModelDescription CountingModel() {
  client::TableDescription table;
  table.name = kTable;
  table.vocabulary_size = kRows;
  table.embedding_dim = 4;
  table.initializer = client::Initializer::Zeros();
  table.optimizer = client::Optimizer{"sgd", {{"learning_rate", 1.0}}};
  client::ModelDescription model;
  model.name = "count";
  model.tables = {table};
  model.features = {{"f", kTable}};
  return model;
}

class VoteTest : public ::testing::Test {
 protected:
  void Start(const std::string& failpoint) {
    auto cluster = Cluster::Start(
        {.coordinators = 2, .config = kTimeouts, .failpoints = {{"coordinator-0", failpoint}}});
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    first_ = ConnectTo(0, /*deadline=*/absl::Seconds(5));
    // The same trainer, through the other coordinator.
    other_ = ConnectTo(1, /*deadline=*/absl::Seconds(20));
    ASSERT_TRUE(first_ != nullptr && other_ != nullptr);
    auto model = first_->DeclareModel(CountingModel());
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    std::iota(ids_.begin(), ids_.end(), 0);
  }
  std::unique_ptr<client::Client> ConnectTo(int coordinator, absl::Duration deadline) {
    client::ClientOptions options = cluster_->client_options();
    options.addresses = {cluster_->address(coordinator)};
    options.client_id = "trainer";
    options.deadline = deadline;
    auto client = client::Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }

  absl::StatusOr<client::LookupResult> Lookup(client::Client& client) {
    return client.Lookup(model_, {{"f", client::DenseIds{absl::MakeConstSpan(ids_), 1}}});
  }
  // Every row gains 1.
  absl::StatusOr<client::ApplyResult> Apply(client::Client& client, client::BatchHandle batch,
                                            uint64_t sequence) {
    const std::vector<float> gradients(kRows * 4, -1.0f);
    client::ApplyOptions options;
    options.sequence = sequence;
    batch.coordinator = 0;
    return client.ApplyGradients(model_, batch, {{"f", gradients, kRows}}, options);
  }
  // What README tells a trainer to do whose coordinator went away: the same request again, and with
  // a new batch if the old one is gone.
  absl::StatusOr<client::ApplyResult> Retry(client::BatchHandle batch, uint64_t sequence) {
    auto applied = Apply(*other_, batch, sequence);
    if (!absl::IsNotFound(applied.status())) return applied;
    auto found = Lookup(*other_);
    if (!found.ok()) return found.status();
    return Apply(*other_, found->batch, sequence);
  }

  std::vector<float> FirstColumn(client::Client& client) {
    auto rows = client.ReadRows(model_, kTable, ids_);
    EXPECT_TRUE(rows.ok()) << rows.status();
    std::vector<float> column;
    for (int64_t i = 0; rows.ok() && i < kRows; ++i) column.push_back(rows->values[i * 4]);
    return column;
  }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<client::Client> first_, other_;
  client::Model model_;
  std::vector<int64_t> ids_ = std::vector<int64_t>(kRows);
};

class DeadCoordinatorTest : public VoteTest, public ::testing::WithParamInterface<const char*> {};

using UpdateTest = DeadCoordinatorTest;
INSTANTIATE_TEST_SUITE_P(Windows, UpdateTest,
                         ::testing::Values("update.votes_are_in=die",
                                           "update.word_is_said=die:300@1",
                                           "update.word_is_said=die:300@2", "update.is_made=die"));

TEST_P(UpdateTest, IsMadeOnceOnAllShards) {
  Start(GetParam());
  auto found = Lookup(*first_);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_FALSE(Apply(*first_, found->batch, 1).ok()) << "its coordinator dies";
  auto applied = Retry(found->batch, 1);
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->rows_updated, kRows);
  EXPECT_THAT(FirstColumn(*other_), ::testing::Each(1.0f));
  // Training goes on, and the number stays used.
  auto next = Lookup(*other_);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_TRUE(Apply(*other_, next->batch, 1)->replayed);
  next = Lookup(*other_);
  ASSERT_TRUE(next.ok()) << next.status();
  ASSERT_TRUE(Apply(*other_, next->batch, 2).ok());
  EXPECT_THAT(FirstColumn(*other_), ::testing::Each(2.0f));
}

using AssignTest = DeadCoordinatorTest;
INSTANTIATE_TEST_SUITE_P(Windows, AssignTest,
                         ::testing::Values("assign.votes_are_in=die",
                                           "assign.word_is_next=die:300@2", "assign.is_made=die"));

TEST_P(AssignTest, IsMadeOnAllShardsOrOnNone) {
  Start(GetParam());
  client::AssignOptions options;
  options.sequence = 1;
  const std::vector<float> values(kRows * 4, 7.0f);
  ASSERT_FALSE(first_->AssignRows(model_, kTable, ids_, values, options).ok());
  auto assigned = other_->AssignRows(model_, kTable, ids_, values, options);
  ASSERT_TRUE(assigned.ok()) << assigned.status();
  EXPECT_THAT(FirstColumn(*other_), ::testing::Each(7.0f));
  // A copy of the request that comes late does not undo what came after.
  const std::vector<float> newer(kRows * 4, 8.0f);
  client::AssignOptions next;
  next.sequence = 2;
  ASSERT_TRUE(other_->AssignRows(model_, kTable, ids_, newer, next).ok());
  assigned = other_->AssignRows(model_, kTable, ids_, values, options);
  ASSERT_TRUE(assigned.ok()) << assigned.status();
  EXPECT_TRUE(*assigned);
  EXPECT_THAT(FirstColumn(*other_), ::testing::Each(8.0f));
}

// A coordinator that stops in the middle and goes on when its trainer has gone on through another:
// its words come late, and to nothing.
using LateWordTest = DeadCoordinatorTest;
INSTANTIATE_TEST_SUITE_P(Windows, LateWordTest,
                         ::testing::Values("update.votes_are_in=stop",
                                           "update.word_is_said=stop:300@1"));

TEST_P(LateWordTest, ComesToNothing) {
  Start(GetParam());
  auto found = Lookup(*first_);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_FALSE(Apply(*first_, found->batch, 1).ok()) << "its coordinator stands still";
  auto applied = Retry(found->batch, 1);
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_THAT(FirstColumn(*other_), ::testing::Each(1.0f));
  cluster_->ResumeCoordinator(0);
  // Its late words are answered before this lookup of its own is.
  ASSERT_TRUE(Lookup(*first_).ok());
  absl::SleepFor(absl::Seconds(1));
  EXPECT_THAT(FirstColumn(*other_), ::testing::Each(1.0f));
  // The stopped one finds the result, too.
  auto again = Apply(*first_, found->batch, 1);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->replayed);
  EXPECT_THAT(FirstColumn(*other_), ::testing::Each(1.0f));
}

// Nobody comes back for the update: votes do not pile up, and no shard is left with half of it.
TEST_F(VoteTest, WhatNobodyRetriesIsDecidedByAnotherCoordinator) {
  Start("update.word_is_said=die:300@1");
  auto found = Lookup(*first_);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_FALSE(Apply(*first_, found->batch, 1).ok());
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  std::vector<float> column;
  do {
    absl::SleepFor(absl::Milliseconds(100));
    column = FirstColumn(*other_);
  } while (absl::Now() < deadline && std::count(column.begin(), column.end(), 1.0f) < kRows);
  EXPECT_THAT(column, ::testing::Each(1.0f)) << "one shard had made it, so the other does";
}

// An assignment that failed because a shard stood still has changed nothing, then or later.
TEST_F(VoteTest, AnAssignmentThatFailedDoesNotLandLater) {
  Start("");
  cluster_->SuspendShard(1);
  client::AssignOptions options;
  options.deadline = absl::Seconds(2);
  const std::vector<float> values(kRows * 4, 7.0f);
  ASSERT_FALSE(first_->AssignRows(model_, kTable, ids_, values, options).ok());
  cluster_->ResumeShard(1);
  const absl::Time end = absl::Now() + absl::Seconds(3);
  while (absl::Now() < end) {
    EXPECT_THAT(FirstColumn(*other_), ::testing::Each(0.0f));
    absl::SleepFor(absl::Milliseconds(300));
  }
}

}  // namespace
}  // namespace emberd::testing
