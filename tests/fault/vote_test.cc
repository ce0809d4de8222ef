// An update, alone or of a SYNC group, and an assignment are made on all shards or on none, and
// once, whatever happens to the coordinator that was asked: it dies or stops at every step on the
// way, and the trainer goes on through the other one. Rows count their updates, so a lost, doubled
// or half-made one shows.
#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fault/counting_cluster.h"
#include "tests/testing/metrics.h"

namespace emberd::testing {
namespace vote_test {

class VoteTest : public ::testing::Test {
 protected:
  void Start(const std::string& failpoint) {
    auto started = CountingCluster::Start({{"coordinator-0", failpoint}});
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = *std::move(started);
  }

  absl::StatusOr<client::LookupResult> Lookup(client::Client& client) {
    return cluster_->Lookup(client);
  }
  absl::StatusOr<client::ApplyResult> Apply(client::Client& client, client::BatchHandle batch,
                                            uint64_t sequence) {
    return cluster_->Apply(client, batch, sequence);
  }
  // Every row becomes `value`. Whether it had been assigned before.
  absl::StatusOr<bool> Assign(client::Client& client, float value, uint64_t sequence) {
    client::AssignOptions options;
    options.sequence = sequence;
    const std::vector<float> values(CountingCluster::kRows * 4, value);
    return client.AssignRows(cluster_->model(), CountingCluster::kTable, cluster_->ids(), values,
                             options);
  }
  std::vector<float> FirstColumn(client::Client& client) { return cluster_->Counts(client); }

  client::Client& first() { return cluster_->first(); }
  client::Client& other() { return cluster_->other(); }

  std::unique_ptr<CountingCluster> cluster_;
};

constexpr int64_t kRows = CountingCluster::kRows;

class DeadCoordinatorTest : public VoteTest, public ::testing::WithParamInterface<const char*> {};

using UpdateTest = DeadCoordinatorTest;
INSTANTIATE_TEST_SUITE_P(Windows, UpdateTest,
                         ::testing::Values("update.votes_are_in=die",
                                           "update.word_is_said=die:300@1",
                                           "update.word_is_said=die:300@2", "update.is_made=die"));

TEST_P(UpdateTest, IsMadeOnceOnAllShards) {
  Start(GetParam());
  auto found = Lookup(first());
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_FALSE(Apply(first(), found->batch, 1).ok()) << "its coordinator dies";
  auto applied = cluster_->Retry(found->batch, 1);
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->rows_updated, kRows);
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(1.0f));
  // Training goes on, and the number stays used.
  auto next = Lookup(other());
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_TRUE(Apply(other(), next->batch, 1)->replayed);
  next = Lookup(other());
  ASSERT_TRUE(next.ok()) << next.status();
  ASSERT_TRUE(Apply(other(), next->batch, 2).ok());
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(2.0f));
}

using AssignTest = DeadCoordinatorTest;
INSTANTIATE_TEST_SUITE_P(Windows, AssignTest,
                         ::testing::Values("assign.votes_are_in=die",
                                           "assign.word_is_next=die:300@2", "assign.is_made=die"));

TEST_P(AssignTest, IsMadeOnAllShardsOrOnNone) {
  Start(GetParam());
  ASSERT_FALSE(Assign(first(), 7.0f, 1).ok());
  auto assigned = Assign(other(), 7.0f, 1);
  ASSERT_TRUE(assigned.ok()) << assigned.status();
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(7.0f));
  // A copy of the request that comes late does not undo what came after.
  ASSERT_TRUE(Assign(other(), 8.0f, 2).ok());
  assigned = Assign(other(), 7.0f, 1);
  ASSERT_TRUE(assigned.ok()) << assigned.status();
  EXPECT_TRUE(*assigned);
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(8.0f));
}

// One shard has made an assignment, the other holds it, and the model is reset. Would catch: the
// first answers the retry from its record, the other makes it, and the new rows have half of it.
TEST_F(VoteTest, AHalfMadeAssignmentIsMadeOnAllRowsOfAReset) {
  Start("assign.word_is_next=die:300@2");
  ASSERT_FALSE(Assign(first(), 7.0f, 1).ok()) << "its coordinator dies";
  ASSERT_TRUE(other().ResetModel(cluster_->model().name).ok());
  const auto again = Assign(other(), 7.0f, 1);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE(*again);
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(7.0f));
}

// The same, but its coordinator goes on after the reset, and tries again by itself.
TEST_F(VoteTest, AnAssignmentThatAResetInterruptsIsMadeOnTheNewRows) {
  Start("assign.word_is_next=stop:300@2");
  absl::StatusOr<bool> assigned = absl::UnknownError("not called");
  std::thread trainer([&] { assigned = Assign(first(), 7.0f, 1); });
  EXPECT_TRUE(cluster_->cluster().AwaitStandstill(0));
  EXPECT_TRUE(other().ResetModel(cluster_->model().name).ok());
  cluster_->cluster().ResumeCoordinator(0);
  trainer.join();
  ASSERT_TRUE(assigned.ok()) << assigned.status();
  EXPECT_FALSE(*assigned);
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(7.0f));
}

// An update that was half made finds no batch after the reset; its trainer looks up again and sends
// the gradients under the same number.
TEST_F(VoteTest, AHalfMadeUpdateIsMadeOnAllRowsOfAReset) {
  Start("update.word_is_said=die:300@1");
  auto found = Lookup(first());
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_FALSE(Apply(first(), found->batch, 1).ok()) << "its coordinator dies";
  ASSERT_TRUE(other().ResetModel(cluster_->model().name).ok());
  const auto applied = cluster_->Retry(found->batch, 1);
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_FALSE(applied->replayed);
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(1.0f));
}

// A coordinator that stops in the middle and goes on when its trainer has gone on through another:
// its words come late, and to nothing.
using LateWordTest = DeadCoordinatorTest;
INSTANTIATE_TEST_SUITE_P(Windows, LateWordTest,
                         ::testing::Values("update.votes_are_in=stop",
                                           "update.word_is_said=stop:300@1"));

TEST_P(LateWordTest, ComesToNothing) {
  Start(GetParam());
  auto found = Lookup(first());
  ASSERT_TRUE(found.ok()) << found.status();
  absl::Status given_up;
  std::thread trainer([&] { given_up = Apply(first(), found->batch, 1).status(); });
  EXPECT_TRUE(cluster_->cluster().AwaitStandstill(0));
  first().CancelCalls();
  trainer.join();
  ASSERT_TRUE(absl::IsCancelled(given_up)) << given_up;
  auto applied = cluster_->Retry(found->batch, 1);
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(1.0f));
  cluster_->cluster().ResumeCoordinator(0);
  // Its late words are answered before this lookup of its own is.
  ASSERT_TRUE(Lookup(first()).ok());
  absl::SleepFor(absl::Seconds(1));
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(1.0f));
  // The stopped one finds the result, too.
  auto again = Apply(first(), found->batch, 1);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->replayed);
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(1.0f));
}

// Nobody comes back for the update: votes do not pile up, and no shard is left with half of it.
TEST_F(VoteTest, WhatNobodyRetriesIsDecidedByAnotherCoordinator) {
  Start("update.word_is_said=die:300@1");
  auto found = Lookup(first());
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_FALSE(Apply(first(), found->batch, 1).ok());
  const auto made = [](const auto& rows) { return std::count(rows.begin(), rows.end(), 1.0f); };
  EXPECT_TRUE(Eventually([&] { return made(FirstColumn(other())) == kRows; }))
      << "one shard had made it, so the other does";
}

// The same for a step of a SYNC group: rank 0, or both ranks, on the coordinator that dies. They go
// on through the other; a step that was decided is made on all shards, one that was not on none.
struct GroupWindow {
  const char* failpoint;
  std::vector<int> coordinators;  // by rank
};

class GroupStepTest : public VoteTest, public ::testing::WithParamInterface<GroupWindow> {};
INSTANTIATE_TEST_SUITE_P(
    Windows, GroupStepTest,
    ::testing::Values(GroupWindow{"update.votes_are_in=die@3", {0, 1}},
                      GroupWindow{"update.word_is_said=die:300@5", {0, 1}},
                      GroupWindow{"update.word_is_said=die:300@6", {0, 1}},
                      GroupWindow{"update.is_made=die@3", {0, 1}},
                      GroupWindow{"update.votes_are_in=die@5", {0, 0}},
                      // The word of one rank to one shard is all that is said.
                      GroupWindow{"update.votes_are_in=wait:2000@6,update.word_is_said=die:300@9",
                                  {0, 0}},
                      GroupWindow{"update.is_made=die@5", {0, 0}}));

TEST_P(GroupStepTest, IsMadeOnceOnAllShards) {
  Start(GetParam().failpoint);
  auto joined = cluster_->Join(GetParam().coordinators);
  ASSERT_TRUE(joined.ok()) << joined.status();
  ASSERT_EQ(*joined, 0);
  for (int64_t step = 0; step < 2; ++step) {
    const absl::Status status = cluster_->Step(step);
    ASSERT_TRUE(status.ok()) << status;
  }
  ASSERT_FALSE(cluster_->Step(2).ok()) << "a coordinator dies";
  joined = cluster_->Join({1, 1});
  ASSERT_TRUE(joined.ok()) << joined.status();
  // Their votes were in, so it was decided, or nobody had said a word.
  EXPECT_THAT(*joined, ::testing::AnyOf(2, 3));
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(2.0f * static_cast<float>(*joined)));
  for (int64_t step = *joined; step < 5; ++step) {
    const absl::Status status = cluster_->Step(step);
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(10.0f));
}

// A group is dropped whose trainers do not come back for a step that one shard has made and the
// other only holds: it is finished first. The coordinator that is gone keeps nobody in the group.
using DroppedGroupTest = GroupStepTest;
INSTANTIATE_TEST_SUITE_P(
    Windows, DroppedGroupTest,
    ::testing::Values(GroupWindow{"update.word_is_said=die:300@5", {0, 1}},
                      GroupWindow{"update.votes_are_in=wait:2000@6,update.word_is_said=die:300@9",
                                  {0, 0}}));

TEST_P(DroppedGroupTest, LeavesNoHalfStep) {
  Start(GetParam().failpoint);
  ASSERT_TRUE(cluster_->Join(GetParam().coordinators).ok());
  for (int64_t step = 0; step < 2; ++step) ASSERT_TRUE(cluster_->Step(step).ok());
  ASSERT_FALSE(cluster_->Step(2).ok()) << "a coordinator dies";
  cluster_->Leave();
  const auto dropped = Await([&] { return other().DropGroup(cluster_->model().name, "run"); });
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  EXPECT_TRUE(*dropped);
  const std::vector<float> counts = FirstColumn(other());
  EXPECT_THAT(counts, ::testing::AnyOf(::testing::Each(4.0f), ::testing::Each(6.0f)));
  const auto joined = cluster_->Join({1, 1});
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(*joined, 0);
  ASSERT_TRUE(cluster_->Step(0).ok());
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(counts[0] + 2.0f));
}

// Nobody dies, but one shard hears nothing between its vote and the word, for longer than batches
// are kept: in a group's first step, when shards know nothing of the group yet, and in a later one.
class SilentShardTest : public VoteTest, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Steps, SilentShardTest, ::testing::Values(0, 2));

TEST_P(SilentShardTest, MakesTheStepWhenItIsBack) {
  const int cut = GetParam();
  const std::string stops = absl::StrCat("update.votes_are_in=stop@", cut + 1);
  auto started = CountingCluster::Start({{"coordinator-0", stops}, {"coordinator-1", stops}},
                                        "shard_call_ms: 10000 batch_ttl_ms: 10000");
  ASSERT_TRUE(started.ok()) << started.status();
  cluster_ = *std::move(started);
  ASSERT_TRUE(cluster_->Join({0, 1}).ok());
  for (int64_t step = 0; step < cut; ++step) ASSERT_TRUE(cluster_->Step(step).ok());
  absl::Status status;
  std::thread trainers([&] { status = cluster_->Step(cut); });
  for (const int i : {0, 1}) EXPECT_TRUE(cluster_->cluster().AwaitStandstill(i));
  cluster_->cluster().SuspendShard(1);
  for (const int i : {0, 1}) cluster_->cluster().ResumeCoordinator(i);
  trainers.join();
  EXPECT_FALSE(status.ok()) << "shard 1 has not answered";
  absl::SleepFor(absl::Seconds(3));
  cluster_->cluster().ResumeShard(1);
  const auto joined = Await([&] { return cluster_->Join({0, 1}); });
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(*joined, cut + 1);
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(2.0f * static_cast<float>(cut + 1)));
  for (int64_t step = *joined; step < 5; ++step) ASSERT_TRUE(cluster_->Step(step).ok());
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(10.0f));
}

// A step that is skipped is decided like any other, and counted once. Where it was decided, it is
// over: the trainers do not come to it again.
using SkippedStepTest = GroupStepTest;
INSTANTIATE_TEST_SUITE_P(
    Windows, SkippedStepTest,
    ::testing::Values(GroupWindow{"update.votes_are_in=die@3", {0, 1}},
                      GroupWindow{"update.word_is_said=die:300@5", {0, 1}},
                      GroupWindow{"update.votes_are_in=wait:2000@6,update.word_is_said=die:300@9",
                                  {0, 0}},
                      GroupWindow{"update.is_made=die@5", {0, 0}}));

TEST_P(SkippedStepTest, IsCountedOnceOnAllShards) {
  Start(GetParam().failpoint);
  ASSERT_TRUE(cluster_->Join(GetParam().coordinators).ok());
  for (int64_t step = 0; step < 2; ++step) {
    const absl::Status status = cluster_->Step(step);
    ASSERT_TRUE(status.ok()) << status;
  }
  ASSERT_FALSE(cluster_->Step(2, /*dying=*/-1, /*skip=*/true).ok()) << "a coordinator dies";
  const auto joined = cluster_->Join({1, 1});
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_THAT(*joined, ::testing::AnyOf(2, 3));
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(4.0f));
  for (int64_t step = *joined; step < 5; ++step) {
    const absl::Status status = cluster_->Step(step, -1, /*skip=*/step == 2);
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_THAT(FirstColumn(other()), ::testing::Each(8.0f));
}

// An assignment that failed because a shard stood still has changed nothing, then or later.
TEST_F(VoteTest, AnAssignmentThatFailedDoesNotLandLater) {
  Start("");
  cluster_->cluster().SuspendShard(1);
  client::AssignOptions options;
  options.deadline = absl::Seconds(2);
  const std::vector<float> values(kRows * 4, 7.0f);
  ASSERT_FALSE(
      first()
          .AssignRows(cluster_->model(), CountingCluster::kTable, cluster_->ids(), values, options)
          .ok());
  EXPECT_TRUE(Eventually([&] {  // its coordinator has given it up, too
    const std::string page = FetchMetrics(cluster_->cluster().http_address(0));
    return !page.empty() && MetricSum(page, "emberd_in_flight_requests") == 0;
  }));
  cluster_->cluster().ResumeShard(1);
  const absl::Time end = absl::Now() + absl::Seconds(3);
  while (absl::Now() < end) {
    EXPECT_THAT(FirstColumn(other()), ::testing::Each(0.0f));
    absl::SleepFor(absl::Milliseconds(300));
  }
}

}  // namespace vote_test
}  // namespace emberd::testing
