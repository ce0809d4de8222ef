// No two beginnings of a group have the same number, whatever the network does: parts of one would
// be taken for the other's. And numbers grow, so what is late is known by its number.
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing/seed.h"
#include "server/host/group_steps.h"

namespace emberd::host {
namespace group_generation_test {

using testing::HasSubstr;

TEST(GroupGenerationTest, TakesLargerNumbersAndItsOwnAgain) {
  GroupGeneration generation;
  EXPECT_EQ(generation.Newest(), 0u);
  ASSERT_TRUE(generation.Open(5, 100).ok());
  EXPECT_TRUE(generation.Is(5, 100));
  EXPECT_TRUE(generation.Open(5, 100).ok());
  EXPECT_FALSE(generation.Is(5, 101));
  EXPECT_THAT(generation.Open(5, 101).message(), HasSubstr("by another member"));
  EXPECT_THAT(generation.Open(4, 100).message(), HasSubstr("is in generation 5"));
  ASSERT_TRUE(generation.Open(9, 101).ok());
  EXPECT_EQ(generation.Newest(), 9u);
  EXPECT_TRUE(absl::IsAborted(generation.Open(5, 100)));
}

TEST(GroupGenerationTest, WhatWasForgottenCannotBeOpened) {
  GroupGeneration generation(5);
  EXPECT_EQ(generation.Newest(), 5u);
  EXPECT_TRUE(absl::IsAborted(generation.Open(5, 100)));
  EXPECT_TRUE(generation.Open(6, 100).ok());
}

// Members that begin a group anew, and shards, with a network between them that loses, delays,
// repeats and reorders. Members stop anywhere; shards forget the group and keep the number, or go
// back to a checkpoint, all of them, under a new history.
class OpeningSchedule {
 public:
  explicit OpeningSchedule(uint64_t seed)
      : random_(seed), shards_(1 + random_() % 4), checkpoint_(shards_.size()) {}

  // How often a group was begun in all.
  int Run() {
    for (int i = 0; i < 60; ++i) {
      const uint64_t dice = random_() % 100;
      if (dice < 15) Begin(/*tries=*/3);
      if (dice == 15) Forget(&shards_[random_() % shards_.size()]);
      if (dice == 16) checkpoint_ = shards_;
      if (dice == 17) Restore();
      if (dice > 17) Deliver();
    }
    while (!messages_.empty()) Deliver();
    return begun_;
  }

 private:
  struct Shard {
    GroupGeneration generation;
  };
  // One attempt of a member, whose answers come back in any order.
  struct Attempt {
    size_t answers = 0;
    uint64_t newest = 0;
    bool refused = false;
  };

  void Send(std::function<void()> message) { messages_.push_back(std::move(message)); }
  void Deliver() {
    if (messages_.empty()) return;
    const size_t i = random_() % messages_.size();
    const auto message = messages_[i];
    // Some come twice, as where a caller asks again who has heard nothing.
    if (random_() % 8 != 0) messages_.erase(messages_.begin() + static_cast<int64_t>(i));
    if (random_() % 16 != 0) message();  // or it is lost
  }

  // Sends call(shard, state) to every shard; when each has answered once, then(state) goes on.
  template <typename Call, typename Then>
  void AskAll(const Call& call, const Then& then) {
    const auto state = std::make_shared<Attempt>();
    const uint64_t history = history_;
    for (size_t s = 0; s < shards_.size(); ++s) {
      const auto answered = std::make_shared<bool>(false);
      Send([=, this] {
        if (history != history_) return;  // shards refuse what is about other rows
        Attempt answer;
        call(&shards_[s], &answer);
        Send([=, this] {
          if (std::exchange(*answered, true)) return;
          state->newest = std::max(state->newest, answer.newest);
          state->refused = state->refused || answer.refused;
          if (++state->answers == shards_.size()) then(*state);
        });
      });
    }
  }
  void Begin(int tries) {
    if (tries == 0) return;
    AskAll([](Shard* shard, Attempt* answer) { answer->newest = shard->generation.Newest(); },
           [=, this](const Attempt& asked) { Open(asked.newest + 1, tries); });
  }
  void Open(uint64_t number, int tries) {
    const uint64_t opener = ++last_opener_;
    const uint64_t history = history_;
    AskAll([=](Shard* shard,
               Attempt* answer) { answer->refused = !shard->generation.Open(number, opener).ok(); },
           [=, this](const Attempt& opened) {
             if (opened.refused) return Begin(tries - 1);
             ++begun_;
             const auto [first, is_new] = openers_.try_emplace({history, number}, opener);
             EXPECT_TRUE(is_new) << "generation " << number << " of openers " << first->second
                                 << " and " << opener;
           });
  }
  static void Forget(Shard* shard) {
    shard->generation = GroupGeneration(shard->generation.number());
  }
  void Restore() {
    ++history_;
    for (size_t s = 0; s < shards_.size(); ++s) {
      // What GroupSteps does: nobody can go on with a number of then.
      shards_[s].generation = GroupGeneration(checkpoint_[s].generation.number());
    }
  }

  std::mt19937_64 random_;
  std::vector<Shard> shards_;
  std::vector<Shard> checkpoint_;
  uint64_t history_ = 1;
  uint64_t last_opener_ = 0;
  int begun_ = 0;
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> openers_;  // by history and number
  std::vector<std::function<void()>> messages_;
};

TEST(GroupGenerationTest, NoNumberIsUsedTwiceWhateverTheNetworkDoes) {
  const uint64_t seed = TestSeed();
  int begun = 0;
  for (int round = 0; round < 20000 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    begun += OpeningSchedule(seed + round).Run();
  }
  EXPECT_GT(begun, 2000) << "the schedules reach the end";
}

}  // namespace group_generation_test
}  // namespace emberd::host
