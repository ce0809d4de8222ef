// When a pause has settled, every change is made on all shards or on none, and that stays so until
// it ends, whichever order votes and words come in and whichever coordinator stops in the middle. A
// failure here means checkpoints that hold half an update.
#include "server/coordinator/change_pause.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/testing/seed.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/coordinator/testing_shard.h"
#include "server/host/mutation_votes.h"
#include "server/host/shard_checkpoints.h"

namespace emberd::coordinator {
namespace change_pause_test {

using internal::v1::FindMutationResponse;
using ::testing::HasSubstr;

constexpr int kShards = 3;
constexpr uint64_t kModel = 5;

// What a pause could overlook.
enum class Mistake {
  kNone,
  kEnteringIgnored,      // changes that are being checked
  kHeldForUndecided,     // a vote that all shards hold is taken for one that some lack
  kMadeElsewhereMissed,  // nobody asks whether a vote that some shards hold was made on the others
};

host::Mutation NameOf(int change) {
  return {absl::StrCat("client ", change % 2), static_cast<uint64_t>(change + 1), 7};
}

// Messages under way, which are delivered in any order, and some never. One at a time: whoever
// sends or delivers holds the lock of the schedule.
class Network {
 public:
  explicit Network(uint64_t seed) : random_(seed) {}

  void Send(std::function<void()> message) { messages_.push_back({std::move(message), true}); }
  // What happens inside of a shard is not lost.
  void Happen(std::function<void()> event) { messages_.push_back({std::move(event), false}); }
  bool empty() const { return messages_.empty(); }
  void Clear() { messages_.clear(); }
  void Deliver() {
    if (messages_.empty()) return;
    const size_t i = random_() % messages_.size();
    const auto message = std::move(messages_[i]);
    messages_.erase(messages_.begin() + static_cast<int64_t>(i));
    if (!message.may_be_lost || random_() % 16 != 0) message.run();
  }
  void DeliverSome(uint64_t most) {
    for (uint64_t i = random_() % (most + 1); i > 0; --i) Deliver();
  }
  std::mt19937_64& random() { return random_; }

 private:
  struct Message {
    std::function<void()> run;
    bool may_be_lost;
  };
  std::mt19937_64 random_;
  std::vector<Message> messages_;
};

// Gate and votes of a shard whose rows are a set of changes.
class ScheduledShard : public TestingShard {
 public:
  ScheduledShard(int index, Network* network, absl::Mutex* turn, Mistake mistake)
      : TestingShard(index), network_(network), turn_(turn), mistake_(mistake) {
    Answer(host::ShardVerb::kPauseChanges, &ScheduledShard::OnPause);
    Answer(host::ShardVerb::kResumeChanges, &ScheduledShard::OnResume);
    Answer(host::ShardVerb::kFindMutation, &ScheduledShard::OnFind);
    Answer(host::ShardVerb::kDecideMutation, &ScheduledShard::OnDecide);
  }

  const std::set<int>& made() const { return made_; }
  // Called when nothing is under way and a pause asks.
  void set_on_idle(std::function<void()> on_idle) { on_idle_ = std::move(on_idle); }

  using Voted = std::function<void(bool)>;
  void Stage(int change, uint64_t attempt, const Voted& voted) {
    gate_.Enter(kModel, std::nullopt, [=, this](const host::ChangeGate::Pass& pass) {
      network_->Happen([=, this] {
        (void)pass;  // it is inside until here
        host::MutationVotes::Change work;
        work.model_id = kModel;
        work.bytes = 1;
        work.make = [=, this](const host::MutationVotes::RowsCallback& done) {
          network_->Happen([=, this] {
            made_.insert(change);
            done(host::RowCounts{1, 0});
          });
        };
        work.drop = [] {};
        const auto before = votes_.Stage(NameOf(change), attempt, std::move(work));
        network_->Send([=] { voted(before.ok() && !before->has_value()); });
      });
    });
  }
  void Decide(int change, uint64_t attempt, bool commit) {
    votes_.Decide(NameOf(change), attempt, commit, [](const auto&) {});
  }
  void Find(int change, uint64_t attempt, const host::MutationVotes::FoundCallback& found) {
    votes_.Find(NameOf(change), attempt,
                [=, this](const auto& answer) { network_->Send([=] { found(answer); }); });
  }

  // What a pause asks. Anything may happen before and after each answer.
  absl::StatusOr<internal::v1::PauseChangesResponse> OnPause(
      const internal::v1::PauseChangesRequest& request) {
    const absl::MutexLock lock(turn_);
    if (network_->empty() && on_idle_ != nullptr) on_idle_();
    network_->DeliverSome(12);
    internal::v1::PauseChangesResponse response;
    const auto entering = gate_.Pause(request);
    if (!entering.ok()) return entering.status();
    if (mistake_ != Mistake::kEnteringIgnored) response.set_entering(*entering);
    votes_.ListHeld(kModel, response.mutable_mutations());
    if (mistake_ == Mistake::kHeldForUndecided && index() == 0) {
      auto& held = *response.mutable_mutations();
      held.erase(std::remove_if(held.begin(), held.end(),
                                [](const auto& mutation) { return !mutation.making(); }),
                 held.end());
    }
    network_->DeliverSome(12);
    return response;
  }
  absl::StatusOr<internal::v1::ResumeChangesResponse> OnResume(
      const internal::v1::ResumeChangesRequest& request) {
    const absl::MutexLock lock(turn_);
    gate_.Resume(request.model_id(), request.pause_id());
    return internal::v1::ResumeChangesResponse();
  }
  absl::StatusOr<internal::v1::FindMutationResponse> OnFind(
      const internal::v1::FindMutationRequest& request) {
    const absl::MutexLock lock(turn_);
    internal::v1::FindMutationResponse response;
    if (mistake_ == Mistake::kMadeElsewhereMissed) return response;
    std::optional<absl::StatusOr<host::MutationVotes::Found>> found;
    votes_.Find(*host::MutationOf(request.mutation()), request.attempt(),
                [&](auto answer) { found = std::move(answer); });
    while (!found.has_value()) network_->Deliver();  // it is on its way to the rows
    if (!found->ok()) return found->status();
    response.set_state((*found)->state);
    response.set_attempt((*found)->attempt);
    host::SetRowCounts((*found)->rows, &response);
    return response;
  }
  absl::StatusOr<internal::v1::DecideMutationResponse> OnDecide(
      const internal::v1::DecideMutationRequest& request) {
    const absl::MutexLock lock(turn_);
    std::optional<absl::StatusOr<host::RowCounts>> rows;
    votes_.Decide(*host::MutationOf(request.mutation()), request.attempt(), request.commit(),
                  [&](auto answer) { rows = std::move(answer); });
    while (!rows.has_value()) network_->Deliver();
    if (!rows->ok()) return rows->status();
    internal::v1::DecideMutationResponse response;
    host::SetRowCounts(**rows, &response);
    return response;
  }

 private:
  Network* const network_;
  absl::Mutex* const turn_;
  const Mistake mistake_;
  std::function<void()> on_idle_;
  std::set<int> made_;
  host::ChangeGate gate_;
  host::Sequencer order_;
  host::ShardLog log_;  // none
  host::MutationVotes votes_{{.max_held_bytes = 1000}, &order_, &log_};
};

// Coordinators that make changes as Mutations does, message by message, and may stop anywhere; and
// one that pauses and settles again and again.
class PauseSchedule {
 public:
  PauseSchedule(uint64_t seed, Mistake mistake) : network_(seed) {
    model_->id = kModel;
    for (int i = 0; i < kShards; ++i) {
      shards_.push_back(std::make_shared<ScheduledShard>(i, &network_, &turn_, mistake));
    }
    shards_[0]->set_on_idle([this] { TakeChargeOfAll(); });
  }

  ~PauseSchedule() { network_.Clear(); }  // some are of changes that are inside of a gate

  // What went wrong; empty: nothing. Adds the changes that were made to `made`.
  std::string Run(int* made) {
    const int pauses = 1 + static_cast<int>(network_.random()() % 3);
    std::string wrong;
    for (int i = 0; i < pauses && wrong.empty(); ++i) {
      {
        const absl::MutexLock lock(&turn_);
        for (int c = static_cast<int>(network_.random()() % 4); c >= 0; --c) {
          StartVote(changes_++, 10);
          network_.DeliverSome(20);
        }
      }
      wrong = PauseOnce();
    }
    *made += static_cast<int>(shards_[0]->made().size());
    return wrong;
  }

 private:
  struct Answers {
    int count = 0;
    bool all_ok = true;
    bool any_made = false;
  };

  std::string PauseOnce() {
    const step::ShardSet set({shards_.begin(), shards_.end()}, &threads_);
    step::Mutations mutations(set, absl::Seconds(1));
    ChangePause pause(set, &mutations, model_);
    rpc::CallContext context(absl::Now() + absl::Seconds(30));
    const auto settled = pause.Settle(&context);
    if (!settled.ok()) return settled.status().ToString();
    const absl::MutexLock lock(&turn_);
    const std::set<int> moment = shards_[0]->made();
    for (const auto& shard : shards_) {
      if (shard->made() != moment) return "shards were cut at different moments";
    }
    // Whatever still comes, the rows are those of the moment.
    while (!network_.empty()) network_.Deliver();
    for (const auto& shard : shards_) {
      if (shard->made() != moment) return "a change was made in the pause";
    }
    return "";
  }

  // What was left over because words were lost, or coordinators have stopped.
  void TakeChargeOfAll() {
    attempts_ += 10'000;
    for (int change = 0; change < changes_; ++change) StartTakingCharge(change, attempts_);
  }

  void StartVote(int change, uint64_t attempt) {
    auto votes = std::make_shared<Answers>();
    for (const auto& shard : shards_) {
      network_.Send([=, this] {
        shard->Stage(change, attempt, [=, this](bool ok) {
          votes->all_ok = votes->all_ok && ok;
          if (++votes->count == kShards) Say(change, attempt, votes->all_ok);
        });
      });
    }
  }
  void StartTakingCharge(int change, uint64_t attempt) {
    auto found = std::make_shared<Answers>();
    for (const auto& shard : shards_) {
      network_.Send([=, this] {
        shard->Find(
            change, attempt, [=, this](const absl::StatusOr<host::MutationVotes::Found>& answer) {
              found->all_ok = found->all_ok && answer.ok();
              found->any_made = found->any_made ||
                                (answer.ok() && answer->state == FindMutationResponse::COMMITTED);
              if (++found->count < kShards || !found->all_ok) return;
              Say(change, attempt, found->any_made);
              // The retry brings the change again.
              if (!found->any_made) StartVote(change, attempt + 1000);
            });
      });
    }
  }
  void Say(int change, uint64_t attempt, bool commit) {
    for (const auto& shard : shards_) {
      network_.Send([=] { shard->Decide(change, attempt, commit); });
    }
  }

  absl::Mutex turn_;
  Network network_;
  BlockingPool threads_;
  const std::shared_ptr<step::ServedModel> model_ = std::make_shared<step::ServedModel>();
  std::vector<std::shared_ptr<ScheduledShard>> shards_;
  int changes_ = 0;
  uint64_t attempts_ = 0;
};

// Whether one of these schedules goes wrong.
bool GoesWrong(int rounds, Mistake mistake, int* made, std::string* example) {
  const uint64_t seed = TestSeed();
  for (int round = 0; round < rounds; ++round) {
    PauseSchedule schedule(seed + static_cast<uint64_t>(round), mistake);
    const std::string what = schedule.Run(made);
    if (what.empty()) continue;
    *example = absl::StrCat("round ", round, ": ", what);
    return true;
  }
  return false;
}

TEST(ChangePauseTest, ASettledPauseIsOneMomentWhateverTheNetworkDoes) {
  constexpr int kRounds = 300;
  int made = 0;
  std::string example;
  EXPECT_FALSE(GoesWrong(kRounds, Mistake::kNone, &made, &example)) << example;
  EXPECT_GT(made, kRounds);
}

// A shard that says of a group what the test has written down, answer after answer; the last one
// again and again, until its step is decided.
class GroupShard : public TestingShard {
 public:
  GroupShard(int index, std::vector<internal::v1::HeldStep> answers)
      : TestingShard(index), answers_(std::move(answers)) {
    Answer(host::ShardVerb::kPauseChanges, &GroupShard::OnPause);
    Answer(host::ShardVerb::kResumeChanges, &GroupShard::OnResume);
    Answer(host::ShardVerb::kDecideStep, &GroupShard::OnDecide);
  }

  absl::StatusOr<internal::v1::PauseChangesResponse> OnPause(
      const internal::v1::PauseChangesRequest& request) {
    internal::v1::PauseChangesResponse response;
    *response.add_groups() = answers_[std::min(asked_++, answers_.size() - 1)];
    return response;
  }
  absl::StatusOr<internal::v1::ResumeChangesResponse> OnResume(
      const internal::v1::ResumeChangesRequest&) {
    ++resumed_;
    return internal::v1::ResumeChangesResponse();
  }
  absl::StatusOr<internal::v1::DecideStepResponse> OnDecide(
      const internal::v1::DecideStepRequest& request) {
    EXPECT_TRUE(request.commit());
    if (request.generation() != answers_.back().generation()) {
      ++refused_;
      return absl::AbortedError("the generation is over here");
    }
    decided_ = request.step();
    internal::v1::HeldStep made = answers_.back();
    made.set_next_step(request.step() + 1);
    made.set_held_step(-1);
    made.set_complete(false);
    answers_ = {made};
    return internal::v1::DecideStepResponse();
  }
  size_t asked() const { return asked_; }
  int resumed() const { return resumed_; }
  int64_t decided() const { return decided_; }
  int refused() const { return refused_; }  // words of another generation

 private:
  std::vector<internal::v1::HeldStep> answers_;
  size_t asked_ = 0;
  int resumed_ = 0;
  int64_t decided_ = -1;
  int refused_ = 0;
};

internal::v1::HeldStep Step(int64_t next_step, int64_t held_step = -1, bool complete = false,
                            bool making = false) {
  internal::v1::HeldStep step;
  step.set_group("run");
  step.set_known(true);
  step.set_next_step(next_step);
  step.set_held_step(held_step);
  step.set_complete(complete);
  step.set_making(making);
  step.set_generation(3);
  step.set_held_generation(3);
  return step;
}

class GroupPauseTest : public ::testing::Test {
 protected:
  absl::Status Settle(std::vector<internal::v1::HeldStep> first,
                      std::vector<internal::v1::HeldStep> second,
                      absl::Duration patience = absl::Seconds(30)) {
    shards_ = {std::make_shared<GroupShard>(0, std::move(first)),
               std::make_shared<GroupShard>(1, std::move(second))};
    const step::ShardSet set({shards_[0], shards_[1]}, &threads_);
    step::Mutations mutations(set, absl::Seconds(1));
    auto model = std::make_shared<step::ServedModel>();
    model->id = kModel;
    ChangePause pause(set, &mutations, model);
    rpc::CallContext context(absl::Now() + patience);
    return pause.Settle(&context).status();
  }

  BlockingPool threads_;
  std::vector<std::shared_ptr<GroupShard>> shards_;
};

TEST_F(GroupPauseTest, AStepThatSomeRanksHaveNotBroughtComesAfterTheMoment) {
  EXPECT_TRUE(Settle({Step(7, 7)}, {Step(7, 7, /*complete=*/true)}).ok());
  EXPECT_EQ(shards_[0]->asked(), 1u);
  EXPECT_EQ(shards_[0]->resumed(), 1) << "its end lets changes go on";
  EXPECT_EQ(shards_[1]->resumed(), 1);
}

TEST_F(GroupPauseTest, AStepOnItsWayIsWaitedFor) {
  // Its word has come to one shard; then it is on its way to the rows there.
  EXPECT_TRUE(Settle({Step(8), Step(8), Step(8)},
                     {Step(7, 7, true), Step(8, -1, false, /*making=*/true), Step(8)})
                  .ok());
  EXPECT_EQ(shards_[1]->asked(), 3u);
  EXPECT_EQ(shards_[1]->decided(), -1);
}

// All ranks have voted, and whoever has the votes may be gone.
TEST_F(GroupPauseTest, AStepThatAllShardsHoldIsMadeInTheEnd) {
  EXPECT_TRUE(Settle({Step(7, 7, true)}, {Step(7, 7, true)}).ok());
  EXPECT_EQ(shards_[0]->decided(), 7);
  EXPECT_EQ(shards_[1]->decided(), 7);
}

// Whoever said the word to one shard may be gone before it said it to the other.
TEST_F(GroupPauseTest, AStepThatOneShardHasMadeIsMadeByTheOther) {
  EXPECT_TRUE(Settle({Step(8)}, {Step(7, 7, true)}).ok());
  EXPECT_EQ(shards_[0]->decided(), -1);
  EXPECT_EQ(shards_[1]->decided(), 7);
}

// Of a trainer that is gone on one shard, and of the one in its place on the other.
TEST_F(GroupPauseTest, PartsOfTwoGenerationsAreNoStep) {
  internal::v1::HeldStep before = Step(7, 7, true);
  internal::v1::HeldStep after = before;
  before.set_held_generation(2);
  after.set_held_generation(3);
  EXPECT_TRUE(Settle({before}, {after}).ok());
  EXPECT_EQ(shards_[0]->decided(), -1);
  EXPECT_EQ(shards_[1]->decided(), -1);
}

// Whoever has opened the generation of now on all shards, as to drop the group, may give up what is
// left over on one shard just before the word to make it comes to the other.
TEST_F(GroupPauseTest, AStepThatNobodyCanMakeAnyMoreIsLeftToWhoHasOpenedTheGroupAnew) {
  internal::v1::HeldStep left = Step(7, 7, true);
  left.set_generation(4);
  EXPECT_TRUE(Settle({left}, {left}).ok());
  EXPECT_EQ(shards_[0]->asked(), 1u);
  EXPECT_EQ(shards_[0]->decided(), -1);
  EXPECT_EQ(shards_[1]->decided(), -1);
}

// On the shard that has not heard of the new generation, the word of the old one may still come.
// Whoever opens it there, too, may find that nobody has made the step, and give it up: so the first
// shard must not make it in the name of the new generation before the other one has made it.
TEST_F(GroupPauseTest, AStepIsMadeInTheGenerationOfItsParts) {
  internal::v1::HeldStep opened = Step(7, 7, true);
  opened.set_generation(4);
  EXPECT_TRUE(Settle({opened}, {Step(7, 7, true)}).ok());
  EXPECT_EQ(shards_[0]->refused(), 1);
  EXPECT_EQ(shards_[0]->decided(), 7);
  EXPECT_EQ(shards_[1]->decided(), 7);
}

TEST_F(GroupPauseTest, PatienceEnds) {
  const absl::Status status =
      Settle({Step(8)}, {Step(7, 7, /*complete=*/false)}, absl::Milliseconds(50));
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("a step of group 'run'"));
  EXPECT_EQ(shards_[0]->resumed(), 1);
}

TEST(ChangePauseTest, MistakesAreFound) {
  for (const Mistake mistake :
       {Mistake::kEnteringIgnored, Mistake::kHeldForUndecided, Mistake::kMadeElsewhereMissed}) {
    int made = 0;
    std::string example;
    // The first of them shows one case in a few hundred.
    EXPECT_TRUE(GoesWrong(50'000, mistake, &made, &example)) << static_cast<int>(mistake);
  }
}

}  // namespace change_pause_test
}  // namespace emberd::coordinator
