// What a shard knows of groups between their steps: who has opened which generation, how far the
// ranks of a loose group are, and what is left when a group is forgotten.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/host/testing_groups.h"

namespace emberd::host {
namespace group_memory_test {

class GroupMemoryTest : public GroupStepsTest {};

TEST_F(GroupMemoryTest, AGenerationHasOneOpener) {
  EXPECT_EQ(Ask("g").generation(), 0u);
  EXPECT_EQ(Open(1, 1, 5, /*opener=*/0).status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(Open(3, 1, 5, /*opener=*/9).ok());
  EXPECT_TRUE(Open(3, 1, 5, /*opener=*/9).ok()) << "its answer was lost";
  EXPECT_EQ(Open(3, 1, 5, /*opener=*/8).status(),
            absl::AbortedError("group 'g': generation 3 was opened by another member; join again"));
  EXPECT_EQ(Ask("g").generation(), 3u);
  // A question changes nothing: the part that is here stays.
  ASSERT_TRUE(StagePart({"g", 3, 0, 1, 0}).ok());
  EXPECT_EQ(Ask("g").staged_step(), 0);
  EXPECT_EQ(Open(3, 1, 5, /*opener=*/9)->staged_step(), -1) << "its own";
  EXPECT_TRUE(Decide(3, 0, true).ok());
  EXPECT_EQ(Ask("g").next_step(), 1);
  EXPECT_EQ(Ask("other").generation(), 0u) << "asking made it";
}

TEST_F(GroupMemoryTest, AForgottenGroupBeginsAgainButItsNumbersGoOn) {
  ASSERT_TRUE(Open(7, 1).ok());
  EXPECT_TRUE(Commit(*StagePart({"g", 7, 0, 1, 0})).ok());
  EXPECT_THAT(*Drop({"other", "g"}), testing::ElementsAre("g"));
  EXPECT_THAT(*Drop({"g"}), testing::IsEmpty()) << "twice is once";
  EXPECT_FALSE(Ask("g").known());
  EXPECT_EQ(Ask("g").generation(), 7u);
  // What is late of then, an opening too, comes to nothing.
  EXPECT_EQ(StagePart({"g", 7, 0, 1, 1}).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Open(7, 1).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Open(6, 1).status().code(), absl::StatusCode::kAborted);
  ASSERT_TRUE(Open(8, 1).ok());
  EXPECT_FALSE(Ask("g").known());
  EXPECT_EQ(StagePart({"g", 7, 0, 1, 1}).status().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(Commit(*StagePart({"g", 8, 0, 1, 0})).ok()) << "its first step again";
}

// Another shard may have made a step that is whole here.
TEST_F(GroupMemoryTest, AGroupWithAWholeStepIsNotForgotten) {
  ASSERT_TRUE(Open(1, 2).ok());
  ASSERT_TRUE(StagePart({"g", 1, 0, 2, 0}).ok());
  EXPECT_THAT(*Drop({"g"}), testing::ElementsAre("g")) << "half of a step";
  EXPECT_EQ(host_->GetStatus().batches(), 0);
  ASSERT_TRUE(Open(2, 1).ok());
  ASSERT_TRUE(StagePart({"g", 2, 0, 1, 0}).ok());
  EXPECT_EQ(Drop({"other", "g"}).status(),
            absl::FailedPreconditionError(
                "group 'g': step 0 is complete but not decided yet; try again"));
  EXPECT_TRUE(Decide(2, 0, true).ok());
  EXPECT_THAT(*Drop({"g"}), testing::ElementsAre("g"));
}

TEST_F(GroupMemoryTest, TellsOfTheRanksOfALooseGroup) {
  const auto open = [&](const std::string& group, uint64_t generation, bool finished) {
    internal::v1::OpenGroupRequest request;
    request.set_model_id(5);
    request.set_group(group);
    request.set_generation(generation);
    request.set_opener(generation);
    request.set_size(1);
    request.set_history(kHistory);
    request.set_finished(finished);
    return host_->OpenGroup(request).status();
  };
  ASSERT_TRUE(open("g#0", 1, false).ok());
  ASSERT_TRUE(open("g#2", 1, false).ok());
  ASSERT_TRUE(open("h#1", 1, false).ok());
  EXPECT_TRUE(Commit(*StagePart({"g#2", 1, 0, 1, 4})).ok());
  ASSERT_TRUE(open("g#2", 1, true).ok());
  EXPECT_TRUE(absl::IsAborted(open("g#2", 2, true))) << "not its generation";
  const auto ranks = Ask("g#0", 4).ranks();
  ASSERT_EQ(ranks.size(), 2);
  EXPECT_EQ(ranks[0].rank(), 0);
  EXPECT_FALSE(ranks[0].finished());
  EXPECT_EQ(ranks[1].rank(), 2);
  EXPECT_EQ(ranks[1].next_step(), 5);
  EXPECT_TRUE(ranks[1].finished());
  ASSERT_TRUE(open("g#2", 2, false).ok());
  EXPECT_FALSE(Ask("g#0", 4).ranks(1).finished()) << "it has come back";
}

}  // namespace group_memory_test
}  // namespace emberd::host
