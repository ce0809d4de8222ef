// ASYNC and BOUNDED groups, rule by rule. A failure here means that a rank runs further ahead than
// the group's bound allows, or waits for one that has nothing left to do.
// Covers: progress_group.cc
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/group/group.h"
#include "server/group/testing_group.h"

namespace emberd::group::testing {
namespace progress_group_test {

const GroupId kGroup{7, "g"};

class ProgressGroupTest : public ::testing::Test {
 protected:
  void Begin(int size, int64_t first_step = 0) {
    options_ = MakeOptions(size, v1::BOUNDED);
    options_.set_first_step(first_step);
    generations_.resize(size);
  }
  void Join(int rank) { generations_[rank] = host_.Join(kGroup, rank, options_)->generation(); }
  void JoinAll() {
    for (int rank = 0; rank < options_.size(); ++rank) Join(rank);
  }
  AskedStatus Advance(int rank, int64_t next_step, int64_t wait_for) {
    return host_.Advance(kGroup, generations_[rank], rank, next_step, wait_for);
  }
  void Leave(int rank, bool finished) {
    EXPECT_TRUE(host_.Leave(kGroup, generations_[rank], rank, "done", finished).ok());
  }

  TestingHost host_;
  v1::GroupOptions options_;
  std::vector<uint64_t> generations_;
};

TEST_F(ProgressGroupTest, EachRankHasAGenerationAtOnce) {
  for (const v1::Consistency consistency : {v1::ASYNC, v1::BOUNDED}) {
    const GroupId id{7, v1::Consistency_Name(consistency)};
    const AskedJoin first = host_.Join(id, 2, MakeOptions(3, consistency));
    const AskedJoin second = host_.Join(id, 0, MakeOptions(3, consistency));
    ASSERT_TRUE(first.ok() && second.ok());
    EXPECT_LT(first->generation(), second->generation());
    EXPECT_TRUE(first->coordinators().empty());
  }
}

TEST_F(ProgressGroupTest, WaitsForTheSlowestRank) {
  Begin(3);
  JoinAll();
  EXPECT_TRUE(Advance(0, 5, 0).ok());
  const AskedStatus two = Advance(0, 5, 2);
  const AskedStatus three = Advance(0, 5, 3);
  EXPECT_TRUE(Advance(1, 3, 0).ok());
  EXPECT_TRUE(two.waits() && three.waits()) << "for rank 2";
  EXPECT_TRUE(Advance(2, 2, 2).ok());
  EXPECT_TRUE(two.ok());
  EXPECT_TRUE(three.waits());
  EXPECT_TRUE(Advance(2, 4, 3).ok());
  EXPECT_TRUE(three.ok());
}

TEST_F(ProgressGroupTest, RanksThatNeverJoinedStandAtTheFirstStep) {
  Begin(2, /*first_step=*/10);
  Join(0);
  EXPECT_TRUE(Advance(0, 10, 10).ok());
  EXPECT_TRUE(Advance(0, 11, 10).ok());
  EXPECT_TRUE(Advance(0, 11, 11).waits());
}

TEST_F(ProgressGroupTest, TheDeadlineNamesWhoIsBehind) {
  Begin(4);
  JoinAll();
  Advance(1, 6, 0);
  Advance(2, 9, 0);
  Advance(3, 7, 0);
  Leave(3, false);
  const AskedStatus waiting = Advance(0, 9, 8);
  host_.Pass(absl::Milliseconds(250));
  const AskedStatus later = Advance(2, 9, 7);
  host_.Pass(absl::Milliseconds(250));
  EXPECT_EQ(
      waiting.status(),
      absl::DeadlineExceededError(
          "group 'g': rank 0 waited 500 ms for all ranks to come to step 8; rank 1 is in step "
          "6, rank 3 is in step 7 and not here"));
  EXPECT_TRUE(later.waits());
  EXPECT_TRUE(Advance(1, 9, 7).ok());
  EXPECT_TRUE(later.ok());
  EXPECT_TRUE(Advance(0, 9, 7).ok()) << "still a member";
}

TEST_F(ProgressGroupTest, FinishedRanksAreWaitedForNoMore) {
  Begin(3);
  JoinAll();
  Advance(1, 2, 0);
  Advance(2, 4, 0);
  const AskedStatus waiting = Advance(0, 5, 5);
  Leave(2, /*finished=*/true);
  EXPECT_TRUE(waiting.waits());
  Leave(1, /*finished=*/false);
  EXPECT_TRUE(waiting.waits()) << "it may come back";
  Leave(1, /*finished=*/true);  // as is known a moment later
  EXPECT_TRUE(waiting.ok());

  Join(1);
  EXPECT_TRUE(Advance(0, 5, 5).waits()) << "it came back, where it was";
  EXPECT_TRUE(Advance(0, 5, 2).ok());
}

TEST_F(ProgressGroupTest, RanksThatLeaveUnfinishedKeepTheirPlace) {
  Begin(2);
  JoinAll();
  Advance(1, 4, 0);
  Leave(1, false);
  EXPECT_TRUE(Advance(0, 6, 4).ok());
  const AskedStatus waiting = Advance(0, 6, 5);
  Join(1);
  EXPECT_TRUE(waiting.waits());
  EXPECT_TRUE(Advance(1, 5, 0).ok());
  EXPECT_TRUE(waiting.ok());
}

TEST_F(ProgressGroupTest, JoiningAgainOrLeavingEndsTheRanksCalls) {
  Begin(2);
  JoinAll();
  const uint64_t before = generations_[0];
  const AskedStatus first = Advance(0, 3, 3);
  Join(0);
  EXPECT_EQ(first.status(), absl::AbortedError("group 'g': rank 0 joined again in step 3"));
  EXPECT_EQ(host_.Advance(kGroup, before, 0, 4, 0).status().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(host_.Leave(kGroup, before, 0, "the old life", true).ok());
  EXPECT_TRUE(Advance(0, 2, 0).ok()) << "a new life may begin earlier";
  EXPECT_EQ(Advance(0, 1, 0).status(),
            absl::InvalidArgumentError("group 'g': next_step is 1; rank 0 was at step 2 before"));
  const AskedStatus second = Advance(0, 2, 1);
  Leave(0, false);
  EXPECT_EQ(second.status(), absl::AbortedError("group 'g': rank 0 left in step 2"));
  EXPECT_EQ(Advance(0, 2, 0).status().code(), absl::StatusCode::kAborted);
}

TEST_F(ProgressGroupTest, AWithdrawnCallLeavesTheProgress) {
  Begin(2);
  JoinAll();
  const AskedStatus gone = Advance(0, 3, 1);
  gone.withdraw(absl::CancelledError("gone"));
  EXPECT_EQ(gone.status(), absl::CancelledError("group 'g': gone"));
  EXPECT_EQ(host_->load().waiting, 0u);
  EXPECT_TRUE(Advance(1, 3, 3).ok());
  EXPECT_EQ(gone.state->answers, 1);
}

// Its coordinator died when the shards had heard that it has finished, and the host had not. But
// it may have come back since the shards were asked.
TEST_F(ProgressGroupTest, LearnsThatARankWhichLeftHasFinished) {
  Begin(2);
  JoinAll();
  EXPECT_TRUE(Advance(1, 5, 0).ok());
  Leave(1, /*finished=*/false);
  EXPECT_TRUE(Advance(0, 9, 9).waits());
  Join(0);
  pb::AdvanceRequest request = AdvanceOf(kGroup, generations_[0], 0, 9, 9);
  pb::RankProgress* const known = request.add_ranks();
  known->set_rank(1);
  known->set_next_step(4);
  known->set_finished(true);
  const AskedStatus outdated, tells;
  host_->Advance(request, outdated.Callback());
  EXPECT_TRUE(outdated.waits()) << "it has made a step since";
  known->set_next_step(5);
  host_->Advance(request, tells.Callback());
  EXPECT_TRUE(tells.ok());
}

// After a reset, say: how far the ranks of the other rows were would let the new ones run away.
TEST_F(ProgressGroupTest, BeginsAnewForOtherRows) {
  Begin(2);
  const auto join = [&](int rank, uint64_t history) {
    const AskedJoin joined = host_.Join(kGroup, rank, options_, history);
    EXPECT_TRUE(joined.ok()) << joined.status();
    generations_[rank] = joined->generation();
  };
  join(0, 5);
  join(1, 5);
  EXPECT_TRUE(Advance(1, 9, 0).ok());
  Leave(1, /*finished=*/true);
  EXPECT_TRUE(Advance(0, 20, 20).ok());
  join(0, 5);
  join(0, 0);  // a coordinator of an older version does not say
  EXPECT_TRUE(Advance(0, 20, 20).ok()) << "the rows are the same";
  const AskedStatus watch = host_.Watch(kGroup, generations_[0], 0);
  join(1, 6);
  EXPECT_EQ(watch.status(),
            absl::AbortedError("group 'g': its model has other rows now; join again"));
  join(0, 6);
  EXPECT_TRUE(Advance(0, 1, 0).ok());
  const AskedStatus waits = Advance(0, 1, 1);
  EXPECT_TRUE(waits.waits()) << "for rank 1, which is at its first step";
  EXPECT_TRUE(Advance(1, 1, 0).ok());
  EXPECT_TRUE(waits.ok());
}

// The first member's coordinator is of an older version, which does not say which rows it means.
TEST_F(ProgressGroupTest, LearnsOfItsRowsFromALaterMember) {
  Begin(2);
  const AskedJoin first = host_.Join(kGroup, 0, options_, /*history=*/0);
  const AskedStatus watch = host_.Watch(kGroup, first->generation(), 0);
  EXPECT_TRUE(host_.Join(kGroup, 1, options_, 5).ok());
  EXPECT_TRUE(watch.waits()) << "it may well mean these";
  EXPECT_TRUE(host_.Join(kGroup, 1, options_, 6).ok());
  EXPECT_EQ(watch.status(),
            absl::AbortedError("group 'g': its model has other rows now; join again"));
}

// A host that was started again has seen nobody; the ranks that come back tell it what shards know.
TEST_F(ProgressGroupTest, LearnsOfRanksThatHaveNotBeenHere) {
  Begin(4);
  Join(0);
  Join(1);
  const AskedStatus waits = Advance(0, 100, 98);
  EXPECT_TRUE(waits.waits());
  const AskedStatus tells = AskedStatus();
  pb::AdvanceRequest request = AdvanceOf(kGroup, generations_[1], 1, 99, 0);
  const auto add = [&request](int rank, int64_t next_step, bool finished) {
    pb::RankProgress* progress = request.add_ranks();
    progress->set_rank(rank);
    progress->set_next_step(next_step);
    progress->set_finished(finished);
  };
  add(0, 3, true);
  add(2, 98, false);
  add(3, 50, true);
  add(4, 0, false);
  add(-1, 0, true);
  host_->Advance(request, tells.Callback());
  EXPECT_TRUE(tells.ok());
  EXPECT_TRUE(waits.ok()) << "rank 2 is at 98, rank 3 has finished; rank 0 knows itself better";
  const AskedStatus later = Advance(0, 100, 99);
  EXPECT_TRUE(later.waits()) << "rank 2 has not finished";
  // A rank that comes back is at work again, from where it was.
  Join(3);
  EXPECT_TRUE(Advance(1, 99, 51).waits());
  Join(2);
  EXPECT_TRUE(Advance(2, 120, 0).ok());
  EXPECT_TRUE(later.waits()) << "rank 3";
  EXPECT_TRUE(Advance(3, 120, 0).ok());
  EXPECT_TRUE(later.ok());
}

TEST_F(ProgressGroupTest, BoundsTheCallsOfOneRank) {
  Begin(2);
  JoinAll();
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(Advance(0, 1, 1).waits());
  EXPECT_EQ(
      Advance(0, 1, 1).status(),
      absl::ResourceExhaustedError(
          "group 'g': 5 calls of rank 0 wait for other ranks already; at most 5 are allowed"));
}

TEST_F(ProgressGroupTest, RefusesWhatWouldWaitForItself) {
  Begin(2);
  JoinAll();
  EXPECT_EQ(
      Advance(0, 3, 4).status(),
      absl::InvalidArgumentError("group 'g': wait_for is 4; it must be at most next_step, 3"));
  EXPECT_EQ(Advance(0, -1, -1).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ProgressGroupTest, ExchangesNoValues) {
  Begin(1);
  Join(0);
  EXPECT_EQ(
      host_.AllGather(kGroup, generations_[0], 0, 0, 0, "v").status(),
      absl::FailedPreconditionError("group 'g': it is BOUNDED; AllGather is for SYNC groups"));
}

// Whoever is at work has a coordinator that watches, however long it says nothing.
TEST_F(ProgressGroupTest, ARankIsThereAsLongAsItsCoordinatorWatches) {
  Begin(2);
  JoinAll();
  AskedStatus watches[2];
  for (const int rank : {0, 1}) watches[rank] = host_.Watch(kGroup, generations_[rank], rank);
  const AskedStatus ahead = Advance(1, 3, 3);
  host_.Pass(absl::Hours(1));
  EXPECT_EQ(ahead.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(watches[0].waits() && watches[1].waits());
  EXPECT_TRUE(absl::IsFailedPrecondition(host_->Forget(kGroup)));
  watches[0].withdraw(absl::CancelledError("gone"));
  EXPECT_EQ(Advance(0, 1, 0).status(),
            absl::AbortedError(
                absl::StrCat("group 'g': generation ", generations_[0], " is over; join again")));
  EXPECT_TRUE(absl::IsFailedPrecondition(host_->Forget(kGroup))) << "the other is there";
  EXPECT_TRUE(absl::IsAborted(host_.Watch(kGroup, generations_[0]).status()));
  ASSERT_TRUE(host_.Leave(kGroup, generations_[1], 1, "done", true).ok());
  EXPECT_TRUE(absl::IsAborted(watches[1].status()));
  EXPECT_TRUE(host_->Forget(kGroup).ok());
}

}  // namespace progress_group_test
}  // namespace emberd::group::testing
