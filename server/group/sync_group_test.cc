// A SYNC group, rule by rule. A failure here means that the members of a step do not all see the
// same outcome of it: some would apply an update that others have given up.
// Covers: sync_group.cc
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/group/group.h"
#include "server/group/testing_group.h"

namespace emberd::group::testing {
namespace sync_group_test {

using ::testing::ElementsAre;

const GroupId kGroup{7, "g"};

class SyncGroupTest : public ::testing::Test {
 protected:
  void Begin(int size) { generation_ = host_.JoinAll(kGroup, MakeOptions(size)); }
  AskedGather Gather(int rank, int64_t step, const std::string& value, int group_key = 0) {
    return host_.AllGather(kGroup, generation_, rank, group_key, step, value);
  }

  TestingHost host_;
  uint64_t generation_ = 0;
};

TEST_F(SyncGroupTest, BeginsWhenAllRanksHaveJoined) {
  const AskedJoin second = host_.Join(kGroup, 1, MakeOptions(2));
  EXPECT_TRUE(second.waits());
  const AskedJoin first = host_.Join(kGroup, 0, MakeOptions(2));
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->generation(), second->generation());
  EXPECT_THAT(first->coordinators(), ElementsAre("coordinator of 0", "coordinator of 1"));
  EXPECT_EQ(first->SerializeAsString(), second->SerializeAsString());
}

TEST_F(SyncGroupTest, GenerationsAreCountedOverAllGroupsWhateverTheTime) {
  Begin(1);
  const uint64_t first = generation_;
  Begin(1);
  EXPECT_EQ(generation_, first + 1);
  EXPECT_EQ(host_.JoinAll({7, "other"}, MakeOptions(1)), first + 2);
  host_.Pass(absl::Seconds(1));
  Begin(1);
  EXPECT_EQ(generation_, first + 3);
}

TEST_F(SyncGroupTest, GathersValuesInRankOrder) {
  Begin(3);
  const AskedGather last = Gather(2, 17, "c");
  host_.Pass(absl::Microseconds(30));
  const AskedGather first = Gather(0, 17, "a");
  host_.Pass(absl::Microseconds(12));
  EXPECT_TRUE(first.waits() && last.waits());
  const AskedGather middle = Gather(1, 17, "");
  for (const AskedGather* gather : {&first, &middle, &last}) {
    ASSERT_TRUE(gather->ok()) << gather->status();
    EXPECT_THAT((*gather)->values(), ElementsAre("a", "", "c"));
    EXPECT_THAT((*gather)->arrival_us(), ElementsAre(30, 42, 0));
  }
}

TEST_F(SyncGroupTest, KeepsExchangesApartByKeyAndStep) {
  Begin(2);
  const AskedGather flags = Gather(0, 1, "flags", 0);
  const AskedGather masks = Gather(0, 1, "masks", 1);
  const AskedGather next = Gather(0, 2, "next", 0);
  EXPECT_THAT(Gather(1, 2, "n", 0)->values(), ElementsAre("next", "n"));
  EXPECT_THAT(Gather(1, 1, "m", 1)->values(), ElementsAre("masks", "m"));
  EXPECT_TRUE(flags.waits());
  EXPECT_THAT(Gather(1, 1, "f", 0)->values(), ElementsAre("flags", "f"));
  EXPECT_TRUE(flags.ok() && masks.ok() && next.ok());
}

TEST_F(SyncGroupTest, AnswersDuplicatesAlike) {
  Begin(2);
  const AskedGather early = Gather(0, 1, "a");
  const AskedGather repeated = Gather(0, 1, "a");
  const AskedGather changed = Gather(0, 1, "x");
  EXPECT_EQ(changed.status(),
            absl::InvalidArgumentError("group 'g': value: rank 0 sent another value to exchange 0 "
                                       "of step 1 before; it must not change"));
  host_.Pass(absl::Milliseconds(3));
  const AskedGather other = Gather(1, 1, "b");
  host_.Pass(absl::Milliseconds(3));
  const AskedGather late = Gather(0, 1, "a");
  ASSERT_TRUE(early.ok() && repeated.ok() && late.ok());
  EXPECT_EQ(early->SerializeAsString(), other->SerializeAsString());
  EXPECT_EQ(early->SerializeAsString(), repeated->SerializeAsString());
  EXPECT_EQ(early->SerializeAsString(), late->SerializeAsString());
  EXPECT_EQ(Gather(1, 1, "x").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(SyncGroupTest, BoundsTheCallsOfOneRank) {
  Begin(2);
  std::vector<AskedGather> calls;
  for (int i = 0; i < kMaxCallsPerRank; ++i) calls.push_back(Gather(0, 1, "a"));
  EXPECT_EQ(Gather(0, 1, "a").status(),
            absl::ResourceExhaustedError("group 'g': 4 calls of rank 0 wait for exchange 0 of step "
                                         "1 already; at most 4 are allowed"));
  Gather(1, 1, "b");
  for (const AskedGather& call : calls) EXPECT_TRUE(call.ok());
}

TEST_F(SyncGroupTest, ARankThatJoinsAgainEndsTheGeneration) {
  Begin(3);
  ASSERT_FALSE(Gather(0, 16, "a").ok());
  const AskedGather first = Gather(0, 17, "a");
  const AskedGather second = Gather(1, 17, "b");
  const AskedJoin again = host_.Join(kGroup, 2, MakeOptions(3));
  const absl::Status expected =
      absl::AbortedError("group 'g': rank 2 joined again in step 17; join again");
  EXPECT_EQ(first.status(), expected);
  EXPECT_EQ(second.status(), expected);
  EXPECT_EQ(Gather(2, 17, "c").status(), expected) << "the old life of rank 2";
  EXPECT_EQ(Gather(0, 18, "a").status(), expected);

  const uint64_t before = generation_;
  EXPECT_TRUE(again.waits());
  host_.Join(kGroup, 0, MakeOptions(3));
  const AskedJoin last = host_.Join(kGroup, 1, MakeOptions(3));
  ASSERT_TRUE(again.ok() && last.ok());
  generation_ = last->generation();
  EXPECT_GT(generation_, before);
  EXPECT_TRUE(Gather(0, 17, "a").waits()) << "the step begins anew";
  EXPECT_EQ(host_.AllGather(kGroup, before, 0, 0, 17, "a").status().code(),
            absl::StatusCode::kAborted);
}

TEST_F(SyncGroupTest, ARankThatLeavesEndsTheGeneration) {
  Begin(2);
  const AskedGather waiting = Gather(0, 3, "a");
  const AskedStatus watch = host_.Watch(kGroup, generation_);
  (void)host_.Leave(kGroup, generation_ - 1, 1, "an old life", false);
  (void)host_.Leave(kGroup, generation_, 9, "no such rank", false);
  (void)host_.Leave({7, "unknown"}, generation_, 1, "no such group", false);
  EXPECT_TRUE(waiting.waits() && watch.waits());
  (void)host_.Leave(kGroup, generation_, 1, "its stream ended", false);
  const absl::Status expected =
      absl::AbortedError("group 'g': rank 1 left in step 3 (its stream ended); join again");
  EXPECT_EQ(waiting.status(), expected);
  EXPECT_EQ(watch.status(), expected);
  EXPECT_EQ(Gather(1, 3, "b").status(), expected);
  EXPECT_EQ(host_.Watch(kGroup, generation_).status(), expected);
  (void)host_.Leave(kGroup, generation_, 0, "too", false);
  EXPECT_EQ(Gather(0, 3, "a").status(), expected) << "the first reason stays";

  Begin(2);
  (void)host_.Leave(kGroup, generation_, 0, "", /*finished=*/true);
  EXPECT_EQ(Gather(1, 4, "b").status(), absl::AbortedError("group 'g': rank 0 left; join again"));
}

TEST_F(SyncGroupTest, WhatWasCompleteStaysAnswered) {
  Begin(2);
  Gather(0, 5, "a");
  const AskedGather complete = Gather(1, 5, "b");
  Gather(0, 6, "a");
  (void)host_.Leave(kGroup, generation_, 0, "gone", false);
  const AskedGather retried = Gather(1, 5, "b");
  ASSERT_TRUE(retried.ok()) << retried.status();
  EXPECT_EQ(retried->SerializeAsString(), complete->SerializeAsString());
  EXPECT_EQ(Gather(1, 5, "x").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Gather(0, 6, "a").status().code(), absl::StatusCode::kAborted);
}

TEST_F(SyncGroupTest, AMissingRankFailsTheStepForAll) {
  Begin(4);
  const AskedGather first = Gather(2, 9, "c", 1);
  host_.Pass(absl::Milliseconds(300));
  const AskedGather second = Gather(0, 9, "a", 1);
  host_.Pass(absl::Milliseconds(199));
  EXPECT_TRUE(first.waits() && second.waits());
  host_.Pass(absl::Milliseconds(1));
  const absl::Status expected = absl::DeadlineExceededError(
      "group 'g': ranks 1 and 3 did not come to exchange 1 of step 9 within 500 ms; join again");
  EXPECT_EQ(first.status(), expected);
  EXPECT_EQ(second.status(), expected);
  EXPECT_EQ(Gather(1, 9, "b", 1).status(), expected) << "a late rank";
  EXPECT_EQ(Gather(2, 10, "c", 0).status(), expected) << "the generation is over";
}

TEST_F(SyncGroupTest, EachJoinHasItsOwnDeadline) {
  const AskedJoin first = host_.Join(kGroup, 0, MakeOptions(4));
  host_.Pass(absl::Milliseconds(400));
  const AskedJoin second = host_.Join(kGroup, 2, MakeOptions(4));
  host_.Pass(absl::Milliseconds(100));
  EXPECT_EQ(first.status(),
            absl::DeadlineExceededError("group 'g': ranks 1 and 3 did not join within 500 ms"));
  EXPECT_TRUE(second.waits());
  host_.Pass(absl::Milliseconds(400));
  EXPECT_EQ(second.status(),
            absl::DeadlineExceededError("group 'g': ranks 0, 1 and 3 did not join within 500 ms"));
  EXPECT_EQ(host_->load().joining, 0);
}

TEST_F(SyncGroupTest, AWithdrawnJoinHasNotHappened) {
  const AskedJoin gone = host_.Join(kGroup, 0, MakeOptions(2));
  gone.withdraw(absl::CancelledError("gone"));
  EXPECT_EQ(gone.status(), absl::CancelledError("group 'g': gone"));
  const AskedJoin other = host_.Join(kGroup, 1, MakeOptions(2));
  EXPECT_TRUE(other.waits());
  EXPECT_TRUE(host_.Join(kGroup, 0, MakeOptions(2)).ok());
  EXPECT_TRUE(other.ok());
  other.withdraw(absl::CancelledError("too late"));
  EXPECT_EQ(other.state->answers, 1);
}

TEST_F(SyncGroupTest, ANewerJoinOfARankTakesThePlaceOfAWaitingOne) {
  const AskedJoin older = host_.Join(kGroup, 0, MakeOptions(2));
  const AskedJoin newer = host_.Join(kGroup, 0, MakeOptions(2));
  EXPECT_EQ(older.status(), absl::AbortedError("group 'g': rank 0 joined again; join again"));
  EXPECT_TRUE(host_.Join(kGroup, 1, MakeOptions(2)).ok());
  EXPECT_TRUE(newer.ok());
}

TEST_F(SyncGroupTest, AWithdrawnGatherLeavesItsValue) {
  Begin(2);
  const AskedGather gone = Gather(0, 1, "a");
  gone.withdraw(absl::CancelledError("gone"));
  EXPECT_EQ(gone.status(), absl::CancelledError("group 'g': gone"));
  const AskedGather other = Gather(1, 1, "b");
  ASSERT_TRUE(other.ok());
  EXPECT_THAT(other->values(), ElementsAre("a", "b"));
  EXPECT_TRUE(Gather(0, 1, "a").ok()) << "the retry";
  EXPECT_EQ(gone.state->answers, 1);

  const AskedStatus watch = host_.Watch(kGroup, generation_);
  watch.withdraw(absl::CancelledError("gone"));
  EXPECT_EQ(watch.status(), absl::CancelledError("group 'g': gone"));
  EXPECT_EQ(
      Gather(0, 2, "a").status(),
      absl::AbortedError("group 'g': rank 0 left in step 1 (its coordinator is gone); join again"));
}

TEST_F(SyncGroupTest, KeepsAFewCompleteExchangesOnly) {
  Begin(1);
  for (int64_t step = 0; step < 40; ++step) ASSERT_TRUE(Gather(0, step, "v").ok());
  EXPECT_EQ(host_->load().kept_exchanges, kMaxKeptExchanges);
  EXPECT_TRUE(Gather(0, 24, "v").ok());
  EXPECT_EQ(Gather(0, 23, "v").status(),
            absl::OutOfRangeError("group 'g': instance_key is 23; exchange 0 of step 23 is over, "
                                  "and its values are no longer kept"));
  EXPECT_TRUE(Gather(0, 23, "v", 1).ok()) << "another exchange";

  Begin(1);
  const std::string large(kMaxValueBytes, 'v');
  for (int64_t step = 0; step < 40; ++step) ASSERT_TRUE(Gather(0, step, large).ok());
  EXPECT_LE(host_->load().value_bytes, kMaxKeptBytes);
  EXPECT_GE(host_->load().kept_exchanges, 15);
}

TEST_F(SyncGroupTest, BoundsOpenExchanges) {
  Begin(2);
  for (int64_t step = 0; step < 64; ++step) EXPECT_TRUE(Gather(0, step, "v").waits());
  EXPECT_EQ(Gather(0, 64, "v").status(),
            absl::ResourceExhaustedError(
                "group 'g': 64 exchanges wait for ranks already; at most 64 are allowed"));
  EXPECT_TRUE(Gather(1, 0, "v").ok());
  EXPECT_TRUE(Gather(0, 64, "v").waits());
}

TEST_F(SyncGroupTest, HasNoProgressOfItsOwn) {
  Begin(1);
  EXPECT_EQ(host_.Advance(kGroup, generation_, 0, 1, 0).status(),
            absl::FailedPreconditionError("group 'g': it is SYNC; Advance is for BOUNDED groups"));
}

TEST_F(SyncGroupTest, BoundsWatches) {
  Begin(1);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(host_.Watch(kGroup, generation_).waits());
  EXPECT_EQ(
      host_.Watch(kGroup, generation_).status(),
      absl::ResourceExhaustedError("group 'g': 4 calls watch it already; at most 4 are allowed"));
  EXPECT_EQ(host_.Watch(kGroup, generation_ + 1).status().code(), absl::StatusCode::kAborted);
}

TEST(RankListTest, IsShortAndReadable) {
  EXPECT_EQ(RankList({2}), "rank 2");
  EXPECT_EQ(RankList({0, 1}), "ranks 0 and 1");
  EXPECT_EQ(RankList({0, 2, 4}), "ranks 0, 2 and 4");
  EXPECT_EQ(RankList({1, 2, 3}), "ranks 1-3");
  EXPECT_EQ(RankList({0, 1, 3, 4, 5, 9}), "ranks 0, 1, 3-5 and 9");
}

}  // namespace sync_group_test
}  // namespace emberd::group::testing
