// What a shard promises a group: one update per step from all parts, on the first decision to
// commit, once, and only for the generation of now.
#include "server/host/group_steps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/host/hosted_models.h"
#include "server/host/testing_groups.h"

namespace emberd::host {
namespace group_steps_test {

using testing::HasSubstr;

TEST_F(GroupStepsTest, AllPartsMakeOneUpdateOnTheFirstDecision) {
  ASSERT_TRUE(Open(1, 2).ok());
  auto first = StagePart({"g", 1, 0, 2, 0});
  ASSERT_TRUE(first.ok()) << first.status();
  auto second = StagePart({"g", 1, 1, 2, 0});
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(FirstColumnOf(3), 3);  // nothing changes before the decision
  EXPECT_EQ(Commit(*std::move(second))->updated, 2);
  EXPECT_EQ(FirstColumnOf(3), 3 - 4);  // two ranks, two samples each
  EXPECT_EQ(FirstColumnOf(4), 4 - 2);
  EXPECT_EQ(Commit(*std::move(first))->updated,
            2);  // the other rank's decision: answered, not applied again
  EXPECT_EQ(FirstColumnOf(3), 3 - 4);
  EXPECT_EQ(host_->GetStatus().batches(), 0);
}

TEST_F(GroupStepsTest, StepsFollowOneAnother) {
  ASSERT_TRUE(Open(1, 1).ok());
  EXPECT_TRUE(Commit(*StagePart({"g", 1, 0, 1, 7})).ok());  // the first step may have any number
  const auto skipped = StagePart({"g", 1, 0, 1, 9});
  EXPECT_EQ(skipped.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(skipped.status().message(), HasSubstr("the next step is 8"));
  const auto repeated = StagePart({"g", 1, 0, 1, 7});
  EXPECT_EQ(repeated.status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(repeated.status().message(), HasSubstr("join again to go on from step 8"));
  EXPECT_TRUE(Commit(*StagePart({"g", 1, 0, 1, 8})).ok());
}

// As of a shard that was started again between the lookup and the update. A trainer gives up for
// other codes.
TEST_F(GroupStepsTest, APartWhoseBatchIsGoneSaysToJoinAgain) {
  ASSERT_TRUE(Open(1, 1).ok());
  ApplyCommand command = Command(/*handle=*/77);
  command.group_part = TestPart{"g", 1, 0, 1, 3};
  const absl::Status gone = Stage(std::move(command)).status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kAborted) << gone;
  EXPECT_THAT(gone.message(), HasSubstr("'g': the shard does not have the batch of step 3 any"));
  EXPECT_THAT(gone.message(), HasSubstr("; join again"));
}

TEST_F(GroupStepsTest, ASkippedStepIsCountedAndChangesNothing) {
  ASSERT_TRUE(Open(1, 2).ok());
  ApplyCommand skip = Command(0);
  skip.input.stacks.clear();
  skip.input.skip = true;
  ASSERT_TRUE(StagePart({"g", 1, 0, 2, 0}, &skip).ok());
  const absl::Status disagrees = StagePart({"g", 1, 1, 2, 0}).status();
  EXPECT_EQ(disagrees.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(disagrees.message(),
            "group 'g': rank 1: skip of step -1 is false, but true for rank 0");
  auto second = StagePart({"g", 1, 1, 2, 0}, &skip);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(Commit(*std::move(second))->updated, 0);
  EXPECT_EQ(FirstColumnOf(3), 3);
  EXPECT_EQ(Open(1, 2)->next_step(), 1);
  EXPECT_EQ(host_->GetStatus().batches(), 0);
  // The next step is one as any other.
  ASSERT_TRUE(StagePart({"g", 1, 0, 2, 1}).ok());
  EXPECT_EQ(Commit(*StagePart({"g", 1, 1, 2, 1}))->updated, 2);
  EXPECT_EQ(FirstColumnOf(3), 3 - 4);

  ApplyCommand with_gradients = Command(0);
  with_gradients.input.skip = true;
  EXPECT_EQ(StagePart({"g", 1, 0, 2, 2}, &with_gradients).status().message(),
            "gradients of 1 stacks came with a step that is skipped");
}

TEST_F(GroupStepsTest, APartIsRefusedThatDoesNotFitTheOthers) {
  EXPECT_EQ(StagePart({"g", 1, 0, 2, 0}).status().code(), absl::StatusCode::kAborted);  // not open
  ASSERT_TRUE(Open(2, 2).ok());
  EXPECT_EQ(StagePart({"g", 1, 0, 2, 0}).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(StagePart({"g", 2, 0, 3, 0}).status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(StagePart({"g", 2, 0, 2, 4}).ok());
  ApplyCommand other_rate = Command(0);
  other_rate.input.stacks[0].hyperparameters["learning_rate"] = 0.5f;
  const absl::Status refused = StagePart({"g", 2, 1, 2, 4}, &other_rate).status();
  EXPECT_THAT(refused.message(),
              HasSubstr("group 'g': rank 1: hyperparameter learning_rate of stack"));
  EXPECT_THAT(refused.message(), HasSubstr("is 0.5, but not given for rank 0"));
  ApplyCommand other_step = Command(0);
  other_step.input.step = 7;
  EXPECT_EQ(StagePart({"g", 2, 1, 2, 4}, &other_step).status().message(),
            "group 'g': rank 1: step is 7, but -1 for rank 0");
  EXPECT_THAT(StagePart({"g", 2, 1, 2, 5}).status().message(), HasSubstr("others at 4"));
  EXPECT_EQ(StagePart({"g", 2, 0, 2, 4}).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(FirstColumnOf(3), 3);
}

// One shard could notice this when it makes the update, and another, on which one of the two has no
// entries, make it.
TEST_F(GroupStepsTest, APartWithOtherFeaturesIsRefusedBeforeTheDecision) {
  ASSERT_TRUE(Open(1, 2).ok());
  auto first = StagePart({"g", 1, 0, 2, 0});
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status refused = StagePart({"g", 1, 1, 2, 0}, nullptr, {1, 2}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("group 'g': rank 1: the number of features of stack"));
  EXPECT_THAT(refused.message(), HasSubstr("is 2, but 1 for rank 0"));
  EXPECT_EQ(Decide(1, 0, true).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FirstColumnOf(3), 3);
  ASSERT_TRUE(StagePart({"g", 1, 1, 2, 0}).ok());  // its place is still free
  EXPECT_EQ(Commit(*std::move(first))->updated, 2);
  EXPECT_EQ(FirstColumnOf(3), 3 - 4);
}

class LargerGroupTest : public GroupStepsTest {
 protected:
  LargerGroupTest()
      : GroupStepsTest(R"(
          shards { address: "127.0.0.1:0" } sparsecores_per_shard: 2 shard_threads: 2
          coordinators { address: "127.0.0.1:0" })") {}

  // Opens a group whose rank 0 is there and has no say about any stack.
  void OpenWithSilentRank(int size) {
    ASSERT_TRUE(Open(1, size).ok());
    ApplyCommand silent = Command(0);
    silent.input.stacks.clear();
    ASSERT_TRUE(StagePart({"g", 1, 0, size, 0}, &silent).ok());
  }

  ApplyCommand CommandWithRate(float rate) {
    ApplyCommand command = Command(0);
    command.input.stacks[0].hyperparameters["learning_rate"] = rate;
    return command;
  }
};

// Ranks that disagree are found also where a third has no say.
TEST_F(LargerGroupTest, TheLastPartIsHeldAgainstAllOthers) {
  OpenWithSilentRank(3);
  const ApplyCommand half = CommandWithRate(0.5f);
  ASSERT_TRUE(StagePart({"g", 1, 1, 3, 0}, &half).ok());
  const ApplyCommand quarter = CommandWithRate(0.25f);
  const absl::Status refused = StagePart({"g", 1, 2, 3, 0}, &quarter).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("rank 2: hyperparameter learning_rate of stack"));
  EXPECT_THAT(refused.message(), HasSubstr("is 0.25, but 0.5 for rank 1"));
  EXPECT_EQ(Decide(1, 0, true).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FirstColumnOf(3), 3);
  EXPECT_EQ(host_->GetStatus().batches(), 2);
  auto last = StagePart({"g", 1, 2, 3, 0}, &half);
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_EQ(Commit(*std::move(last))->updated, 2);
  EXPECT_EQ(FirstColumnOf(3), 3 - 0.5f * 4);  // two ranks with two samples each
}

// The first part that differs is refused, not one that comes after it and is right.
TEST_F(LargerGroupTest, EveryPartIsHeldAgainstAllThatAreThere) {
  OpenWithSilentRank(4);
  const ApplyCommand half = CommandWithRate(0.5f);
  ASSERT_TRUE(StagePart({"g", 1, 3, 4, 0}, &half).ok());
  const ApplyCommand quarter = CommandWithRate(0.25f);
  const absl::Status rate = StagePart({"g", 1, 1, 4, 0}, &quarter).status();
  EXPECT_EQ(rate.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(rate.message(),
              HasSubstr("group 'g': rank 1: hyperparameter learning_rate of stack"));
  EXPECT_THAT(rate.message(), HasSubstr("is 0.25, but 0.5 for rank 3"));
  const absl::Status features = StagePart({"g", 1, 1, 4, 0}, &half, {1, 2}).status();
  EXPECT_EQ(features.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(features.message(), HasSubstr("group 'g': rank 1: the number of features of stack"));
  EXPECT_THAT(features.message(), HasSubstr("is 2, but 1 for rank 0"));
  ASSERT_TRUE(StagePart({"g", 1, 1, 4, 0}, &half).ok());
  auto last = StagePart({"g", 1, 2, 4, 0}, &half);
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_EQ(Commit(*std::move(last))->updated, 2);
  EXPECT_EQ(FirstColumnOf(3), 3 - 0.5f * 6);  // three ranks with two samples each
  EXPECT_EQ(host_->GetStatus().batches(), 0);
}

TEST_F(GroupStepsTest, ADecisionWithoutAllPartsChangesNothing) {
  ASSERT_TRUE(Open(1, 2).ok());
  auto part = StagePart({"g", 1, 0, 2, 0});
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_EQ(Commit(*std::move(part)).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FirstColumnOf(3), 3);
}

TEST_F(GroupStepsTest, ANewGenerationDropsWhatIsNotWhole) {
  ASSERT_TRUE(Open(1, 2).ok());
  auto part = StagePart({"g", 1, 0, 2, 0});
  ASSERT_TRUE(part.ok()) << part.status();
  host_->Discard(*std::move(part));  // its stream broke: the part stays
  EXPECT_EQ(host_->GetStatus().batches(), 1);
  const auto opened = Open(2, 2);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_FALSE(opened->known());
  EXPECT_EQ(opened->staged_step(), -1);
  EXPECT_EQ(host_->GetStatus().batches(), 0);
  EXPECT_EQ(Open(1, 2).status().code(), absl::StatusCode::kAborted);
}

TEST_F(GroupStepsTest, AWholeStepOfTheLastGenerationCanBeFinished) {
  ASSERT_TRUE(Open(1, 1).ok());
  EXPECT_TRUE(Commit(*StagePart({"g", 1, 0, 1, 0})).ok());
  auto lost = StagePart({"g", 1, 0, 1, 1});
  ASSERT_TRUE(lost.ok()) << lost.status();
  const auto opened = Open(2, 1);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_TRUE(opened->known());
  EXPECT_EQ(opened->next_step(), 1);
  EXPECT_EQ(opened->staged_step(), 1);
  EXPECT_EQ(Commit(*std::move(lost)).status().code(), absl::StatusCode::kAborted);  // fenced off
  EXPECT_EQ(FirstColumnOf(3), 1);
  EXPECT_EQ(Decide(2, 1, true)->updated, 2);
  EXPECT_EQ(Decide(2, 1, true)->updated, 2);  // idempotent
  EXPECT_EQ(FirstColumnOf(3), -1);
  EXPECT_EQ(Open(2, 1)->next_step(), 2);
}

TEST_F(GroupStepsTest, AnUnwantedStepOfTheLastGenerationGoes) {
  ASSERT_TRUE(Open(1, 1).ok());
  ASSERT_TRUE(StagePart({"g", 1, 0, 1, 0}).ok());
  ASSERT_EQ(Open(2, 1)->staged_step(), 0);
  ASSERT_TRUE(StagePart({"g", 2, 0, 1, 0}).ok());  // the group goes on without it
  EXPECT_EQ(host_->GetStatus().batches(), 1);
  EXPECT_TRUE(Decide(2, 0, false).ok());
  EXPECT_EQ(host_->GetStatus().batches(), 0);
  EXPECT_EQ(FirstColumnOf(3), 3);
}

TEST_F(GroupStepsTest, AnUnknownModelIsRefusedAndADroppedOneForgotten) {
  EXPECT_EQ(Open(1, 1, 6).status().code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(Open(1, 1).ok());
  ASSERT_TRUE(StagePart({"g", 1, 0, 1, 0}).ok());
  internal::v1::DropModelRequest drop;
  drop.set_model_id(5);
  drop.set_history(kHistory);
  ASSERT_TRUE(host_->DropModel(drop).ok());
  EXPECT_EQ(Decide(1, 0, true).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(host_->GetStatus().batches(), 0);
}

// A word from before the rows were lost, reset or restored must not meet a step of now that happens
// to have its numbers.
TEST_F(GroupStepsTest, AWordAboutOtherRowsIsRefused) {
  ASSERT_TRUE(Open(1, 1).ok());
  ASSERT_TRUE(StagePart({"g", 1, 0, 1, 0}).ok());
  EXPECT_EQ(Decide(1, 0, true, kHistory + 1).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(FirstColumnOf(3), 3);
  EXPECT_TRUE(Decide(1, 0, true).ok());
}

// GroupSteps alone, with an engine that holds the model.
class HeldPartsTest : public GroupStepsTest {
 protected:
  void Start(int64_t max_held_bytes, int size, absl::Duration step_timeout = absl::Minutes(1),
             absl::Duration idle = absl::Hours(24)) {
    steps_ = std::make_unique<GroupSteps>(
        GroupSteps::Options{.max_held_bytes = max_held_bytes,
                            .part_ttl = absl::Hours(1),
                            .max_groups = 3,
                            .idle = idle},
        engine_.get(), &order_, &log_,
        GroupSteps::Hooks{.release_batch = [](uint64_t) {},
                          .step_applied = [](uint64_t, const shard::ApplyResult&) {}});
    internal::v1::OpenGroupRequest open;
    open.set_model_id(5);
    open.set_group("g");
    open.set_generation(1);
    open.set_opener(9);
    open.set_size(size);
    open.set_step_timeout_ms(absl::ToInt64Milliseconds(step_timeout));
    ASSERT_TRUE(steps_->Open(open).ok());
    CreateModel();
  }
  void CreateModel() {
    EXPECT_TRUE(engine_->CreateModel(ModelSpecFromPlan(5, config_, plan_, 0)).ok());
  }
  // Of which parts are held.
  int WaitingSteps() const {
    GroupSteps::HeldList held;
    steps_->ListHeld(5, &held);
    return static_cast<int>(std::count_if(
        held.begin(), held.end(), [](const auto& group) { return group.held_step() >= 0; }));
  }
  std::shared_ptr<const shard::CheckedPart> Check(const ApplyCommand& command) {
    const auto batch = Preprocess();
    auto prepared = engine_->PrepareBatch(5, batch->ShardView(0), batch);
    EXPECT_TRUE(prepared.ok()) << prepared.status();
    auto checked = shard::CheckedPart::Make(*prepared, command.input);
    EXPECT_TRUE(checked.ok()) << checked.status();
    return *checked;
  }

  CpuPool cpu_{1};
  std::unique_ptr<shard::Engine> engine_ =
      *shard::Engine::Create({.cpu = &cpu_, .bytes_per_partition = 1 << 20});
  Sequencer order_;
  ShardLog log_;  // none
  std::unique_ptr<GroupSteps> steps_;
};

// A rank may be slow for as long as the group allows. When a step is given up, it is given up for
// all: a part that comes later must not find itself in a step that looks whole elsewhere.
TEST_F(HeldPartsTest, PartsThatWaitInVainEndTheirGeneration) {
  Start(/*max_held_bytes=*/1 << 20, /*size=*/2, absl::Hours(2));
  ApplyCommand command = Command(1);
  command.group_part = TestPart{"g", 1, 0, 2, 0};
  ASSERT_TRUE(steps_->Hold(command, Check(command)).ok());
  steps_->Sweep(absl::Now() + absl::Hours(3));
  EXPECT_EQ(WaitingSteps(), 1) << "twice its step_timeout is not over";
  steps_->Sweep(absl::Now() + absl::Hours(5));
  EXPECT_EQ(WaitingSteps(), 0);
  command.group_part = TestPart{"g", 1, 1, 2, 0};
  EXPECT_TRUE(absl::IsAborted(steps_->Hold(command, Check(command))));
  internal::v1::OpenGroupRequest again;
  again.set_model_id(5);
  again.set_group("g");
  again.set_generation(1);
  again.set_opener(9);
  again.set_size(2);
  EXPECT_TRUE(absl::IsAborted(steps_->Open(again).status()));
  again.set_generation(2);
  EXPECT_TRUE(steps_->Open(again).ok());
}

// Another shard may have made it: no clock takes the vote back.
TEST_F(HeldPartsTest, AWholeStepWaitsForItsDecisionHoweverLong) {
  Start(/*max_held_bytes=*/1 << 20, /*size=*/1, absl::Seconds(1));
  ApplyCommand command = Command(1);
  command.group_part = TestPart{"g", 1, 0, 1, 0};
  ASSERT_TRUE(steps_->Hold(command, Check(command)).ok());
  steps_->Sweep(absl::Now() + absl::Hours(24 * 365));
  EXPECT_EQ(WaitingSteps(), 1);
}

// Where room is needed, those go in which nobody has been for longest; never one that holds parts,
// nor one whose ranks may still be on their way.
TEST_F(HeldPartsTest, OldGroupsMakeRoomForNewOnes) {
  const auto open = [&](const std::string& name, uint64_t generation, absl::Duration timeout) {
    internal::v1::OpenGroupRequest request;
    request.set_model_id(5);
    request.set_group(name);
    request.set_generation(generation);
    request.set_opener(9);
    request.set_size(1);
    request.set_step_timeout_ms(absl::ToInt64Milliseconds(timeout));
    return steps_->Open(request).status();
  };
  Start(/*max_held_bytes=*/1 << 20, /*size=*/1, absl::ZeroDuration(), absl::ZeroDuration());
  ApplyCommand command = Command(1);
  command.group_part = TestPart{"g", 1, 0, 1, 0};
  ASSERT_TRUE(steps_->Hold(command, Check(command)).ok());
  ASSERT_TRUE(open("patient", 1, absl::Hours(1)).ok());
  ASSERT_TRUE(open("old", 40, absl::ZeroDuration()).ok());
  EXPECT_TRUE(absl::IsAborted(open("young", 40, absl::Hours(1))))
      << "the number is that of the one which has made room";
  ASSERT_TRUE(open("young", 41, absl::Hours(1)).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(open("another", 42, absl::Hours(1))));
  EXPECT_EQ(WaitingSteps(), 1);
}

// A trainer whose answer was lost learns from it whether the step is its own.
TEST_F(HeldPartsTest, ItIsKnownInWhichGenerationTheLastStepWasMade) {
  Start(/*max_held_bytes=*/1 << 20, /*size=*/1);
  internal::v1::OpenGroupRequest request;
  request.set_model_id(5);
  request.set_group("g");
  const auto made_generation = [&] { return steps_->Open(request)->made_generation(); };
  EXPECT_EQ(made_generation(), 0u) << "there is none";
  ApplyCommand command = Command(1);
  command.group_part = TestPart{"g", 1, 0, 1, 0};
  ASSERT_TRUE(steps_->Hold(command, Check(command)).ok());
  // Who finishes it has not made it.
  internal::v1::OpenGroupRequest open = request;
  open.set_generation(2);
  open.set_opener(9);
  open.set_size(1);
  ASSERT_TRUE(steps_->Open(open).ok());
  absl::Notification made;
  steps_->Commit(5, TestPart{"g", 2, 0, 1, 0}, [&](const auto& rows) {
    EXPECT_TRUE(rows.ok()) << rows.status();
    made.Notify();
  });
  made.WaitForNotification();
  EXPECT_EQ(made_generation(), 1u);

  internal::v1::ShardState saved;
  steps_->Save(5, &saved);
  internal::v1::LogState logged;
  {
    const absl::MutexLock lock(&order_.mutex);
    steps_->Describe(&logged);
  }
  const auto locked = [&](const std::function<std::function<void()>()>& change) {
    std::function<void()> after;
    {
      const absl::MutexLock lock(&order_.mutex);
      after = change();
    }
    after();
  };
  locked([&] { return steps_->DropModel(5); });
  EXPECT_EQ(made_generation(), 0u);
  locked([&] { return steps_->Restore(5, saved, {}); });
  EXPECT_EQ(made_generation(), 1u) << "from a checkpoint";
  locked([&] { return steps_->DropModel(5); });
  const absl::Status read = steps_->Remember(logged, nullptr);
  ASSERT_TRUE(read.ok()) << read;
  EXPECT_EQ(made_generation(), 1u) << "from the log";
}

// The update of a step may still be on its way when its model is reset and the next run of the
// group makes a step under the same names: that is not over, nor has the rows of the other.
TEST_F(HeldPartsTest, AStepOfBeforeAResetDoesNotEndOneOfAfterIt) {
  Start(/*max_held_bytes=*/1 << 20, /*size=*/1);
  absl::Notification go_on;
  cpu_.Submit({1, [&](int) { go_on.WaitForNotification(); }, nullptr});  // its only thread
  const auto commit = [&](uint64_t generation, bool skip, const GroupSteps::RowsCallback& done) {
    ApplyCommand command = Command(1);
    if (skip) command.input.stacks.clear();
    command.input.skip = skip;
    command.group_part = TestPart{"g", generation, 0, 1, 0};
    EXPECT_TRUE(steps_->Hold(command, Check(command)).ok());
    steps_->Commit(5, *command.group_part, done);
  };
  absl::Status before;
  commit(1, /*skip=*/false, [&](const auto& rows) { before = rows.status(); });
  std::function<void()> dropped;
  {
    const absl::MutexLock lock(&order_.mutex);
    dropped = steps_->DropModel(5);
  }
  dropped();
  EXPECT_EQ(before.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(engine_->DropModel(5).ok());
  CreateModel();
  internal::v1::OpenGroupRequest open;
  open.set_model_id(5);
  open.set_group("g");
  open.set_generation(2);
  open.set_opener(9);
  open.set_size(1);
  EXPECT_TRUE(steps_->Open(open).ok());
  absl::StatusOr<RowCounts> after;
  absl::Notification made;
  commit(2, /*skip=*/true, [&](const auto& rows) {
    after = rows;
    made.Notify();
  });
  go_on.Notify();  // first with the update of before
  made.WaitForNotification();
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->updated, 0);
}

TEST_F(HeldPartsTest, WaitingPartsHaveABudget) {
  Start(/*max_held_bytes=*/95, /*size=*/2);
  ApplyCommand command = Command(1);
  command.group_part = TestPart{"g", 1, 0, 2, 0};
  const absl::Status status = steps_->Hold(command, Check(command));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("the gradients have 96 bytes"));
  EXPECT_EQ(WaitingSteps(), 0);
}

// Would catch: a group that can never go on, for its parts find no room beside a step that nobody
// makes any more, and that makes way for the first of them.
TEST_F(HeldPartsTest, AStepThatIsLeftTakesNoRoomFromThePartThatFollowsIt) {
  Start(/*max_held_bytes=*/191, /*size=*/1);
  ApplyCommand command = Command(1);
  command.group_part = TestPart{"g", 1, 0, 1, 0};
  ASSERT_TRUE(steps_->Hold(command, Check(command)).ok());
  internal::v1::OpenGroupRequest again;
  again.set_model_id(5);
  again.set_group("g");
  again.set_generation(2);
  again.set_opener(9);
  again.set_size(2);
  ASSERT_TRUE(steps_->Open(again).ok());
  command.group_part = TestPart{"g", 2, 0, 2, 0};
  const absl::Status first = steps_->Hold(command, Check(command));
  EXPECT_TRUE(first.ok()) << first;
  command.group_part = TestPart{"g", 2, 1, 2, 0};
  const absl::Status second = steps_->Hold(command, Check(command));
  EXPECT_EQ(second.code(), absl::StatusCode::kResourceExhausted) << second;
}

TEST_F(HeldPartsTest, ARefusedPartLeavesNoStepBehind) {
  Start(/*max_held_bytes=*/1 << 20, /*size=*/1);
  ApplyCommand command = Command(1);
  command.group_part = TestPart{"g", 1, 0, 1, 3};
  const auto late = Check(command);
  ASSERT_TRUE(engine_->DropModel(5).ok());
  EXPECT_EQ(steps_->Hold(command, late).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(WaitingSteps(), 0);
  CreateModel();
  command.group_part = TestPart{"g", 1, 0, 1, 4};
  const absl::Status held = steps_->Hold(command, Check(command));
  EXPECT_TRUE(held.ok()) << held;
  EXPECT_EQ(WaitingSteps(), 1);
}

}  // namespace group_steps_test
}  // namespace emberd::host
