// Whoever asks at a closed gate learns of every change that is inside, and nothing comes in until
// the pause is over. A failure here means that a checkpoint cuts through an update that was on its
// way, or that updates wait for a coordinator that is gone.
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/host/mutation_votes.h"
#include "server/host/shard_backend.h"

namespace emberd::host {
namespace change_gate_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint64_t kModel = 5, kOtherModel = 6;
constexpr uint64_t kPause = 7, kOtherPause = 8;
constexpr int64_t kLeaseMs = 60'000;

internal::v1::PauseChangesRequest Request(uint64_t pause_id, const std::string& group = "",
                                          int64_t after_step = 0) {
  internal::v1::PauseChangesRequest request;
  request.set_model_id(kModel);
  request.set_pause_id(pause_id);
  request.set_lease_ms(kLeaseMs);
  request.set_group(group);
  request.set_after_step(after_step);
  return request;
}

class ChangeGateTest : public ::testing::Test {
 protected:
  // The change called `name` wants in; its pass is kept.
  void Enter(const std::string& name, const std::optional<GroupPart>& part = std::nullopt,
             uint64_t model_id = kModel) {
    gate_.Enter(model_id, part, [this, name](ChangeGate::Pass pass) {
      inside_.push_back(name);
      passes_.push_back(std::move(pass));
    });
  }
  static GroupPart PartOf(const std::string& group, int64_t step) {
    GroupPart part;
    part.set_group(group);
    part.set_step(step);
    return part;
  }

  ChangeGate gate_;
  std::vector<std::string> inside_;
  std::vector<ChangeGate::Pass> passes_;
};

TEST_F(ChangeGateTest, ChangesWaitInOrderUntilThePauseIsOver) {
  Enter("before");
  EXPECT_EQ(*gate_.Pause(Request(kPause)), 1);
  Enter("a");
  Enter("b");
  Enter("other", std::nullopt, kOtherModel);
  EXPECT_THAT(inside_, ElementsAre("before", "other"));
  EXPECT_FALSE(gate_.Closed(kModel, kPause)) << "one is inside";
  passes_.clear();
  EXPECT_EQ(*gate_.Pause(Request(kPause)), 0);
  EXPECT_TRUE(gate_.Closed(kModel, kPause));
  EXPECT_FALSE(gate_.Closed(kModel, kOtherPause));
  EXPECT_FALSE(gate_.Closed(kOtherModel, kPause));
  gate_.Resume(kModel, kOtherPause);
  EXPECT_TRUE(gate_.Closed(kModel, kPause)) << "it is not the other's to end";
  gate_.Resume(kModel, kPause);
  EXPECT_THAT(inside_, ElementsAre("before", "other", "a", "b"));
  EXPECT_FALSE(gate_.Closed(kModel, kPause));
  gate_.Resume(kModel, kPause);
}

TEST_F(ChangeGateTest, OnePauseAtATime) {
  ASSERT_TRUE(gate_.Pause(Request(kPause)).ok());
  EXPECT_TRUE(absl::IsAborted(gate_.Pause(Request(kOtherPause)).status()));
  gate_.Resume(kModel, kPause);
  EXPECT_TRUE(gate_.Pause(Request(kOtherPause)).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(gate_.Pause(Request(0)).status()));
  internal::v1::PauseChangesRequest forever = Request(kOtherPause);
  forever.set_lease_ms(24 * 3600 * 1000);
  EXPECT_TRUE(absl::IsInvalidArgument(gate_.Pause(forever).status()));
}

TEST_F(ChangeGateTest, APauseOfAGroupHoldsBackItsLaterStepsAlone) {
  ASSERT_TRUE(gate_.Pause(Request(kPause, "run", 10)).ok());
  Enter("run 10", PartOf("run", 10));
  Enter("run 11", PartOf("run", 11));
  Enter("other 11", PartOf("other", 11));
  Enter("unary");
  EXPECT_THAT(inside_, ElementsAre("run 10", "other 11", "unary"));
  passes_.clear();
  EXPECT_FALSE(gate_.Closed(kModel, kPause)) << "others may come in";
  // Then all are held back.
  ASSERT_TRUE(gate_.Pause(Request(kPause)).ok());
  EXPECT_TRUE(gate_.Closed(kModel, kPause));
  Enter("late");
  EXPECT_THAT(inside_, ElementsAre("run 10", "other 11", "unary"));
  gate_.Resume(kModel, kPause);
  EXPECT_THAT(inside_, ElementsAre("run 10", "other 11", "unary", "run 11", "late"));
}

// Would catch: ranks that all ask for a checkpoint of one step, and stand still. Who waits for the
// pause of another one keeps its part of the step back; that pause waits for the step.
TEST_F(ChangeGateTest, OneRankOfAGroupAsksForTheCheckpointOfAStep) {
  ASSERT_TRUE(gate_.Pause(Request(kPause, "run", 10)).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(gate_.Pause(Request(kOtherPause, "run", 10)).status()));
  EXPECT_TRUE(absl::IsAborted(gate_.Pause(Request(kOtherPause, "run", 11)).status()));
  EXPECT_TRUE(absl::IsAborted(gate_.Pause(Request(kOtherPause, "other", 10)).status()));
  EXPECT_TRUE(gate_.Pause(Request(kPause, "run", 10)).ok()) << "it is renewed";
}

TEST_F(ChangeGateTest, APauseThatNobodyRenewsEnds) {
  ASSERT_TRUE(gate_.Pause(Request(kPause)).ok());
  Enter("a");
  gate_.Sweep(absl::Now() + absl::Milliseconds(kLeaseMs / 2));
  EXPECT_THAT(inside_, IsEmpty());
  gate_.Sweep(absl::Now() + absl::Milliseconds(kLeaseMs + 1));
  EXPECT_THAT(inside_, ElementsAre("a"));
  passes_.clear();
  EXPECT_FALSE(gate_.Closed(kModel, kPause));
}

// Whoever has paused late must not take a gate for closed that the sweeper has not come to.
TEST_F(ChangeGateTest, ALeaseThatIsOverIsNoPause) {
  internal::v1::PauseChangesRequest request = Request(kPause);
  request.set_lease_ms(1);
  ASSERT_TRUE(gate_.Pause(request).ok());
  absl::SleepFor(absl::Milliseconds(5));
  EXPECT_FALSE(gate_.Closed(kModel, kPause));
}

// Changes from many threads, while pauses come and go: whenever the gate says that it is closed,
// nobody is inside; and everybody comes in at last.
TEST_F(ChangeGateTest, NobodyIsInsideWhileItIsClosed) {
  constexpr int kThreads = 4, kPauses = 100;
  std::atomic<bool> done{false};
  std::atomic<int> inside{0};
  std::atomic<int64_t> entered{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      while (!done) {
        std::atomic<bool> in{false};
        gate_.Enter(kModel, std::nullopt, [&](const ChangeGate::Pass&) {
          ++inside;
          ++entered;
          --inside;
          in = true;
        });
        while (!in) std::this_thread::yield();
      }
    });
  }
  int64_t before = 0;
  for (uint64_t pause = 1; pause <= kPauses; ++pause) {
    while (entered == before) std::this_thread::yield();  // somebody comes between two pauses
    while (*gate_.Pause(Request(pause)) > 0) std::this_thread::yield();
    ASSERT_TRUE(gate_.Closed(kModel, pause));
    before = entered;
    for (int i = 0; i < 10; ++i) {
      ASSERT_EQ(inside, 0);
      std::this_thread::yield();
    }
    ASSERT_EQ(entered, before);
    gate_.Resume(kModel, pause);
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace change_gate_test
}  // namespace emberd::host
