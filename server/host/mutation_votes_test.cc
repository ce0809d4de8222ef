// What a shard promises about a vote, and that the votes of several shards keep a mutation whole:
// it is made on all of them or on none, and once, whichever messages are lost or late and whichever
// coordinator stops in the middle.
#include "server/host/mutation_votes.h"

#include <algorithm>
#include <memory>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing/seed.h"

namespace emberd::host {
namespace mutation_votes_test {

using internal::v1::FindMutationResponse;
using testing::HasSubstr;

const Mutation kMutation{"c", 1, 7};

// One shard, whose rows are a count of changes.
struct VotingShard {
  explicit VotingShard(MutationVotes::Options options = {.max_held_bytes = 100})
      : votes(options, &order, &log) {}

  absl::StatusOr<std::optional<RowCounts>> Stage(uint64_t attempt,
                                                 const Mutation& mutation = kMutation,
                                                 int64_t bytes = 1) {
    MutationVotes::Change change;
    change.model_id = 5;
    change.history = 9;
    change.bytes = bytes;
    change.make = [this](MutationVotes::RowsCallback done) {
      ++made;
      on_their_way.push_back(std::move(done));
    };
    change.drop = [this] { ++dropped; };
    change.check = [this] { return gone; };
    return votes.Stage(mutation, attempt, std::move(change));
  }
  absl::StatusOr<RowCounts> Decide(uint64_t attempt, bool commit) {
    absl::StatusOr<RowCounts> result = absl::UnknownError("no answer yet");
    votes.Decide(kMutation, attempt, commit, [&](auto rows) { result = rows; });
    Arrive();
    return result;
  }
  size_t Held() const { return votes.Undecided(absl::InfiniteFuture()).size(); }
  absl::StatusOr<MutationVotes::Found> Find(uint64_t attempt) {
    absl::StatusOr<MutationVotes::Found> result = absl::UnknownError("no answer yet");
    votes.Find(kMutation, attempt, [&](auto found) { result = found; });
    Arrive();
    return result;
  }
  void DropModel(bool rows_stay = false) {
    std::function<void()> drop;
    {
      const absl::MutexLock lock(&order.mutex);
      drop = votes.DropModel(5, rows_stay);
    }
    drop();
  }
  // The engine is done.
  void Arrive() {
    for (const auto& done : std::exchange(on_their_way, {})) done(RowCounts{3, 1});
  }

  Sequencer order;
  ShardLog log;  // none
  MutationVotes votes;
  int made = 0;
  int dropped = 0;
  absl::Status gone;  // of the change's model
  std::vector<MutationVotes::RowsCallback> on_their_way;
};

TEST(MutationVotesTest, AVoteIsMadeOnTheWordOfItsAttempt) {
  VotingShard shard;
  EXPECT_FALSE(shard.Stage(10)->has_value());
  EXPECT_EQ(shard.made, 0);
  EXPECT_EQ(shard.Find(0)->state, FindMutationResponse::STAGED);
  EXPECT_EQ(shard.Decide(10, true)->updated, 3);
  EXPECT_EQ(shard.made, 1);
  EXPECT_EQ(shard.Find(0)->state, FindMutationResponse::COMMITTED);
  EXPECT_EQ(shard.Find(0)->rows, (RowCounts{3, 1}));
  EXPECT_EQ(shard.Decide(10, true)->updated, 3) << "a word that comes twice";
  EXPECT_EQ(shard.Stage(11)->value().updated, 3);
  EXPECT_EQ(shard.made, 1);
  EXPECT_TRUE(shard.Stage(10, {"d", 1, 7}, 100).ok()) << "it takes nothing of the budget any more";
}

TEST(MutationVotesTest, ADroppedVoteGivesBackWhatItHeldAndMayComeAgain) {
  VotingShard shard;
  ASSERT_TRUE(shard.Stage(10).ok());
  ASSERT_TRUE(shard.Decide(10, false).ok());
  EXPECT_EQ(shard.dropped, 1);
  EXPECT_EQ(shard.Held(), 0u);
  EXPECT_TRUE(absl::IsAborted(shard.Decide(10, true).status()));
  EXPECT_FALSE(shard.Stage(11)->has_value());
  ASSERT_TRUE(shard.Decide(11, true).ok());
  EXPECT_EQ(shard.made, 1);
}

TEST(MutationVotesTest, WhoTakesChargeMakesLateVotesAndWordsComeToNothing) {
  VotingShard shard;
  ASSERT_TRUE(shard.Stage(10).ok());
  EXPECT_EQ(shard.Find(20)->state, FindMutationResponse::STAGED);
  EXPECT_TRUE(absl::IsAborted(shard.Decide(10, true).status()));
  EXPECT_TRUE(absl::IsAborted(shard.Decide(10, false).status()));
  EXPECT_TRUE(absl::IsAborted(shard.Find(15).status()));
  EXPECT_EQ(shard.Held(), 1u) << "taking charge takes nothing back";
  ASSERT_TRUE(shard.Decide(20, false).ok());
  EXPECT_TRUE(absl::IsAborted(shard.Stage(10).status())) << "a vote of before that comes late";
  EXPECT_FALSE(shard.Stage(20)->has_value());
  ASSERT_TRUE(shard.Decide(20, true).ok());
  EXPECT_EQ(shard.made, 1);
}

TEST(MutationVotesTest, WhoTakesChargeMayMakeWhatAnotherBrought) {
  VotingShard shard;
  ASSERT_TRUE(shard.Stage(10).ok());
  ASSERT_TRUE(shard.Find(20).ok());
  EXPECT_EQ(shard.Decide(20, true)->updated, 3);
  EXPECT_EQ(shard.made, 1);
}

TEST(MutationVotesTest, AnAnswerWaitsForTheRows) {
  VotingShard shard;
  ASSERT_TRUE(shard.Stage(10).ok());
  shard.votes.Decide(kMutation, 10, true, [](const auto&) {});
  bool answered = false;
  shard.votes.Find(kMutation, 20, [&](const absl::StatusOr<MutationVotes::Found>& found) {
    answered = found.ok() && found->state == FindMutationResponse::COMMITTED;
  });
  EXPECT_FALSE(answered);
  EXPECT_TRUE(absl::IsAborted(shard.Stage(30).status()));
  shard.Arrive();
  EXPECT_TRUE(answered);
}

// Shards compare what they have made of a history. What was on its way as a segment began must be
// listed after a recovery, too.
TEST(MutationVotesTest, WhatIsOnItsWayAsASegmentBeginsKeepsItsHistory) {
  VotingShard shard, recovered;
  ASSERT_TRUE(shard.Stage(10).ok());
  shard.votes.Decide(kMutation, 10, true, [](const auto&) {});
  internal::v1::LogState state;
  {
    const absl::MutexLock lock(&shard.order.mutex);
    shard.votes.Describe(&state);
  }
  shard.Arrive();
  ASSERT_EQ(state.votes_size(), 1);
  recovered.votes.Remember(
      state, [](const auto&) { return std::nullopt; },
      [&](const Mutation&, MutationVotes::RowsCallback done) {
        recovered.on_their_way.push_back(std::move(done));
      });
  recovered.Arrive();
  MutationRecord::Names made;
  recovered.votes.record().ListNewest(5, 9, &made);
  EXPECT_EQ(made.size(), 1);
}

TEST(MutationVotesTest, ANumberBelongsToOneRequest) {
  VotingShard shard;
  ASSERT_TRUE(shard.Stage(10).ok());
  const Mutation other{"c", 1, 8};
  EXPECT_THAT(shard.Stage(11, other).status().message(), HasSubstr("needs a number of its own"));
  ASSERT_TRUE(shard.Decide(10, true).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(shard.Stage(11, other).status()));
}

TEST(MutationVotesTest, StaysWithinItsBudget) {
  VotingShard shard({.max_held_bytes = 100, .max_held = 2});
  ASSERT_TRUE(shard.Stage(10, {"a", 1, 0}, 100).ok());
  const absl::Status full = shard.Stage(10, {"b", 1, 0}, 1).status();
  EXPECT_TRUE(absl::IsResourceExhausted(full));
  EXPECT_THAT(full.message(), HasSubstr("1 bytes in addition to the 100 of 1"));
  ASSERT_TRUE(shard.Stage(10, {"b", 1, 0}, 0).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(shard.Stage(10, {"c", 1, 0}, 0).status()));
}

// What must be remembered of mutations that nobody makes is bounded, and what is forgotten refused.
TEST(MutationVotesTest, AnAttemptThatIsForgottenIsRefused) {
  VotingShard shard({.max_held_bytes = 100, .max_fenced = 2});
  for (const char* client : {"c", "d", "e"}) {
    shard.votes.Find({client, 1, 7}, 20, [](const auto& found) { EXPECT_TRUE(found.ok()); });
  }
  EXPECT_TRUE(absl::IsFailedPrecondition(shard.Stage(30).status()));
  EXPECT_FALSE(shard.Stage(30, {"e", 1, 7})->has_value());
}

// Would catch: a trainer that repeats a request for an hour, as while the disk of a shard is full,
// and is refused for good in the end, or has others refused, though nobody has made their changes.
TEST(MutationVotesTest, ARequestThatIsTriedAgainAndAgainTakesOnePlace) {
  VotingShard shard({.max_held_bytes = 100, .max_fenced = 2});
  shard.votes.Find({"d", 1, 7}, 20, [](const auto& found) { EXPECT_TRUE(found.ok()); });
  for (uint64_t attempt = 10; attempt < 20; ++attempt) {
    const auto voted = shard.Stage(attempt);
    ASSERT_TRUE(voted.ok()) << voted.status();
    ASSERT_TRUE(shard.Decide(attempt, false).ok());
  }
  internal::v1::LogState state;
  {
    const absl::MutexLock lock(&shard.order.mutex);
    shard.votes.Describe(&state);
  }
  EXPECT_EQ(state.fenced_size(), 2);
  EXPECT_TRUE(absl::IsAborted(shard.Stage(10, {"d", 1, 7}).status())) << "it is still remembered";
  EXPECT_FALSE(shard.Stage(20)->has_value());
  EXPECT_TRUE(shard.Decide(20, true).ok());
}

TEST(MutationVotesTest, AModelThatIsDroppedTakesItsVotesWithIt) {
  VotingShard shard;
  ASSERT_TRUE(shard.Stage(10).ok());
  EXPECT_EQ(shard.Held(), 1u);
  const auto drop_model = [&](uint64_t model_id) {
    std::function<void()> dropped;
    {
      const absl::MutexLock lock(&shard.order.mutex);
      dropped = shard.votes.DropModel(model_id);
    }
    EXPECT_EQ(shard.dropped, 0) << "under the lock";
    dropped();
  };
  drop_model(4);
  EXPECT_EQ(shard.Held(), 1u);
  drop_model(5);
  EXPECT_EQ(shard.Held(), 0u);
  EXPECT_EQ(shard.dropped, 1);
}

// Would catch: a fence that gives way to what is left of an older one of its own number. Whoever
// asked for it then reads memory that is gone, and the number is refused for good.
TEST(MutationVotesTest, AFenceIsNewAfterItsModelWasDropped) {
  VotingShard shard({.max_held_bytes = 100, .max_fenced = 1});
  ASSERT_TRUE(shard.Find(10).ok());
  ASSERT_TRUE(shard.Stage(10).ok());
  shard.DropModel();
  const auto found = shard.Find(20);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->attempt, 20u);
  const auto voted = shard.Stage(20);
  EXPECT_TRUE(voted.ok()) << voted.status();
}

// Would catch: a change that is answered as made, though the rows that a reset has made since have
// nothing of it; or one that is made on those shards alone which had not made it before the reset.
// And one that is made twice in rows that another model keeps.
TEST(MutationVotesTest, WhatWasMadeIsForgottenWithItsRows) {
  for (const bool rows_stay : {false, true}) {
    for (const bool on_its_way : {false, true}) {
      VotingShard shard;
      ASSERT_TRUE(shard.Stage(10).ok());
      shard.votes.Decide(kMutation, 10, true, [](const auto&) {});
      if (!on_its_way) shard.Arrive();
      shard.DropModel(rows_stay);
      if (on_its_way && !rows_stay) {
        EXPECT_TRUE(absl::IsAborted(shard.Find(0).status())) << "it says nothing about new rows";
      }
      shard.Arrive();
      const auto again = shard.Stage(11);
      ASSERT_TRUE(again.ok()) << again.status();
      EXPECT_EQ(again->has_value(), rows_stay) << "on its way: " << on_its_way;
    }
  }
}

// The log would give it to the rows that have come under the same name.
TEST(MutationVotesTest, NobodyVotesOnRowsThatWereDroppedMeanwhile) {
  VotingShard shard;
  shard.gone = absl::NotFoundError("the model was dropped");
  EXPECT_TRUE(absl::IsNotFound(shard.Stage(10).status()));
  EXPECT_EQ(shard.Held(), 0u);
  shard.gone = absl::OkStatus();
  EXPECT_TRUE(shard.Stage(10).ok());
}

// Shards and coordinators with a network between them that loses, delays and reorders. Every
// coordinator does what Mutations does, message by message, and may stop anywhere.
class Schedule {
 public:
  static constexpr int kShards = 3;
  static constexpr int kMaxCoordinators = 4;
  static constexpr uint64_t kForGood = 1'000'000;  // larger than all attempts

  explicit Schedule(uint64_t seed) : random_(seed) {
    for (int i = 0; i < kShards; ++i) shards_.push_back(std::make_unique<VotingShard>());
  }

  void Run() {
    const int coordinators = 1 + static_cast<int>(random_() % kMaxCoordinators);
    for (int c = 0; c < coordinators; ++c) {
      (random_() % 3 == 0) ? StartTakingCharge(Attempt(100, c)) : StartVote(Attempt(10, c));
      for (int i = static_cast<int>(random_() % 12); i > 0; --i) Deliver();
    }
    while (!messages_.empty()) Deliver();
    SettleForGood();
  }

  // Of one shard.
  std::vector<int> made() const {
    std::vector<int> counts;
    for (const auto& shard : shards_) counts.push_back(shard->made);
    return counts;
  }
  bool acknowledged() const { return acknowledged_; }

 private:
  // One coordinator, whose answers come back in any order.
  struct Coordinator {
    int answers = 0;
    bool all_ok = true;
    bool any_made = false;
  };
  // No two coordinators have the same: later numbers of one are larger by whole multiples.
  static uint64_t Attempt(uint64_t number, int coordinator) {
    return number * kMaxCoordinators + coordinator;
  }

  void Send(std::function<void()> message) { messages_.push_back(std::move(message)); }
  void Deliver() {
    if (messages_.empty()) return;
    const size_t i = random_() % messages_.size();
    const auto message = std::move(messages_[i]);
    messages_.erase(messages_.begin() + static_cast<int64_t>(i));
    if (random_() % 8 != 0) message();  // or it is lost
  }
  // Sends call(shard) to every shard; when all have answered, then(state) goes on.
  template <typename Call, typename Then>
  void AskAll(const Call& call, const Then& then) {
    auto state = std::make_shared<Coordinator>();
    for (int s = 0; s < kShards; ++s) {
      Send([=, this] {
        call(*shards_[s], state.get());
        Send([=] {
          if (++state->answers == kShards) then(*state);
        });
      });
    }
  }

  void StartVote(uint64_t attempt) {
    AskAll(
        [=](VotingShard& shard, Coordinator* state) {
          const auto voted = shard.Stage(attempt);
          state->all_ok = state->all_ok && voted.ok() && !voted->has_value();
        },
        [=, this](const Coordinator& votes) {
          if (votes.all_ok) return Say(attempt, true);
          if (random_() % 2 == 0) return Say(attempt, false);
          StartTakingCharge(attempt + Attempt(100 + random_() % 100, 0));
        });
  }
  void StartTakingCharge(uint64_t attempt) {
    AskAll(
        [=](VotingShard& shard, Coordinator* state) {
          const auto found = shard.Find(attempt);
          state->all_ok = state->all_ok && found.ok();
          if (found.ok() && found->state == FindMutationResponse::COMMITTED) state->any_made = true;
        },
        [=, this](const Coordinator& found) {
          if (!found.all_ok) return;
          Say(attempt, found.any_made);
          // The retry brings the change again. Its number is new, or a late word of now would take
          // back its votes.
          if (!found.any_made) Send([=, this] { StartVote(attempt + Attempt(1000, 0)); });
        });
  }
  void Say(uint64_t attempt, bool commit) {
    AskAll(
        [=](VotingShard& shard, Coordinator* state) {
          state->all_ok = shard.Decide(attempt, commit).ok() && state->all_ok;
        },
        [=, this](const Coordinator& said) {
          acknowledged_ = acknowledged_ || (commit && said.all_ok);
        });
  }

  void SettleForGood() {
    bool any_made = false;
    for (const auto& shard : shards_) {
      const auto found = shard->Find(kForGood);
      ASSERT_TRUE(found.ok()) << found.status();
      any_made = any_made || found->state == FindMutationResponse::COMMITTED;
    }
    for (const auto& shard : shards_) {
      const auto found = shard->Find(kForGood);
      if (found->state == FindMutationResponse::STAGED) {
        ASSERT_TRUE(shard->Decide(kForGood, any_made).ok());
      }
    }
  }

  std::mt19937_64 random_;
  std::vector<std::unique_ptr<VotingShard>> shards_;
  std::vector<std::function<void()>> messages_;
  bool acknowledged_ = false;
};

TEST(MutationVotesTest, IsMadeOnAllShardsOrOnNoneWhateverTheNetworkDoes) {
  const uint64_t seed = TestSeed();
  int made = 0, settled_before = 0;
  for (int round = 0; round < 20000; ++round) {
    Schedule schedule(seed + round);
    schedule.Run();
    const std::vector<int> counts = schedule.made();
    ASSERT_THAT(counts, testing::AnyOf(testing::Each(0), testing::Each(1))) << "round " << round;
    if (schedule.acknowledged()) {
      ASSERT_THAT(counts, testing::Each(1)) << "round " << round;
    }
    made += counts[0];
    settled_before += schedule.acknowledged();
  }
  // The schedules reach both ends.
  EXPECT_GT(made, settled_before);
  EXPECT_GT(settled_before, 100);
  EXPECT_LT(made, 19900);
}

}  // namespace mutation_votes_test
}  // namespace emberd::host
