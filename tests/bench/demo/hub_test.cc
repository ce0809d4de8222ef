#include "tests/bench/demo/hub.h"

#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include "base/file_descriptor.h"

namespace emberd::demo {
namespace hub_test {

using testing::ElementsAre;

// Trainers on threads, the hub on the test's own.
class HubTest : public testing::Test {
 protected:
  void Start(int trainers) {
    std::vector<int> sockets;
    for (int i = 0; i < trainers; ++i) {
      int ends[2];
      ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
      hub_ends_.emplace_back(ends[0]);
      trainer_ends_.emplace_back(ends[1]);
      sockets.push_back(ends[0]);
    }
    hub_ = std::make_unique<Hub>(
        sockets,
        Hub::Events{.on_sum = [this](const auto&, const auto& sum) { sums_.push_back(sum); },
                    .on_round =
                        [this](int64_t round, const auto& reports) {
                          rounds_.push_back(round);
                          for (const RoundReport& report : reports)
                            rows_.push_back(report.rows_updated);
                        },
                    .on_report =
                        [this](int rank, const std::string& text) {
                          reports_.push_back(std::to_string(rank) + " " + text);
                        },
                    .on_gone =
                        [this](int rank) {
                          gone_.push_back(rank);
                          replace_(rank);
                        },
                    .dense_state =
                        [] {
                          return std::vector<float>{7, 8};
                        }});
  }

  void Run() {
    while (hub_->live() > 0) {
      std::vector<pollfd> waiting;
      for (int rank = 0; rank < hub_->size(); ++rank)
        waiting.push_back({hub_->socket(rank), POLLIN, 0});
      ASSERT_GT(poll(waiting.data(), waiting.size(), 10'000), 0) << "nobody says anything";
      for (int rank = 0; rank < hub_->size(); ++rank) {
        if (waiting[rank].revents != 0) hub_->OnReadable(rank);
      }
    }
  }

  // A trainer that does `rounds` rounds from where it begins and goes. Told to join anew, it is in
  // the next generation.
  std::thread Trainer(int rank, int64_t rounds, uint64_t generation = 1) {
    return std::thread([this, rank, rounds, generation]() mutable {
      SocketGroup group(trainer_ends_[rank].get());
      const auto position = group.Begin();
      ASSERT_TRUE(position.ok()) << position.status();
      begun_[rank] = *position;
      bool summed = position->summed;
      const auto check = [&](const absl::Status& status) {
        if (!absl::IsAborted(status)) return status.ok();
        group.Leave({generation++});
        return false;
      };
      for (int64_t round = position->round; round < rounds;) {
        if (!summed) {
          const auto sum = group.Reduce({.round = round,
                                         .generation = generation,
                                         .examples = 10 + rank,
                                         .gradient = {1.0f, static_cast<float>(rank)}});
          summed = check(sum.status());
        }
        if (summed &&
            check(group.Finish({.generation = generation, .rows_updated = 100 * round + rank}))) {
          ++round;
          summed = false;
        }
        if (generation > 5) break;
      }
      generations_[rank] = generation;
      trainer_ends_[rank].Close();
    });
  }

  std::vector<FileDescriptor> hub_ends_, trainer_ends_;
  std::unique_ptr<Hub> hub_;
  std::vector<GradientSum> sums_;
  Position begun_[3];
  uint64_t generations_[3] = {};
  std::vector<int64_t> rounds_, rows_;
  std::vector<std::string> reports_;
  std::vector<int> gone_;
  std::function<void(int rank)> replace_ = [](int) {};
};

TEST_F(HubTest, SumsAndEndsRounds) {
  Start(3);
  std::thread trainers[] = {Trainer(0, 2), Trainer(1, 2), Trainer(2, 2)};
  Run();
  for (std::thread& trainer : trainers) trainer.join();
  EXPECT_TRUE(begun_[2].dense_state.empty());
  ASSERT_EQ(sums_.size(), 2u);
  EXPECT_EQ(sums_[0].examples, 33);
  EXPECT_THAT(sums_[0].gradient, ElementsAre(3.0f, 3.0f));
  EXPECT_THAT(rounds_, ElementsAre(0, 1));
  EXPECT_THAT(rows_, ElementsAre(0, 1, 2, 100, 101, 102));
  EXPECT_THAT(generations_, ElementsAre(1, 1, 1));
}

// One that waits for the sum, and one that waits for the end of the round, must hear that the third
// has lost its stream: else it would wait for them in emberd's group, and they for it here.
TEST_F(HubTest, TellsAllToJoinAnewWhenOneHasTo) {
  Start(2);
  std::thread other = Trainer(1, 2);
  std::thread first([this] {
    SocketGroup group(trainer_ends_[0].get());
    ASSERT_TRUE(group.Begin().ok());
    const Contribution contribution{.round = 0, .examples = 1, .gradient = {1, 1}};
    group.Leave({1});
    Contribution again = contribution;
    again.generation = 2;
    ASSERT_TRUE(group.Reduce(again).ok());
    group.Leave({2});  // before its update has been applied
    ASSERT_TRUE(group.Finish({.generation = 3}).ok());
    again = {.round = 1, .generation = 3, .examples = 1, .gradient = {1, 1}};
    ASSERT_TRUE(group.Reduce(again).ok());
    ASSERT_TRUE(group.Finish({.generation = 3}).ok());
    trainer_ends_[0].Close();
  });
  Run();
  first.join();
  other.join();
  EXPECT_EQ(generations_[1], 3u);
  EXPECT_THAT(rounds_, ElementsAre(0, 1));
  EXPECT_EQ(sums_.size(), 2u);
}

// Ranks that do not depend on each other give 0 and are left alone.
TEST_F(HubTest, LeavesMembersWithoutAGenerationAlone) {
  Start(2);
  std::thread other = Trainer(1, 2, 0);
  std::thread first([this] {
    SocketGroup group(trainer_ends_[0].get());
    ASSERT_TRUE(group.Begin().ok());
    for (int64_t round = 0; round < 2; ++round) {
      group.Leave({0});
      ASSERT_TRUE(group.Reduce({.round = round, .examples = 1, .gradient = {1, 1}}).ok());
      group.Leave({0});
      ASSERT_TRUE(group.Finish({}).ok());
    }
    trainer_ends_[0].Close();
  });
  Run();
  first.join();
  other.join();
  EXPECT_THAT(rounds_, ElementsAre(0, 1));
  EXPECT_EQ(generations_[1], 0u);
}

// A trainer that dies must not hang the others: they wait for the one that takes its place, which
// begins where the run is.
TEST_F(HubTest, AnotherTrainerTakesThePlaceOfADeadOne) {
  Start(2);
  std::thread dying([this] {
    SocketGroup group(trainer_ends_[0].get());
    ASSERT_TRUE(group.Begin().ok());
    ASSERT_TRUE(
        group.Reduce({.round = 0, .generation = 1, .examples = 1, .gradient = {1, 1}}).ok());
    trainer_ends_[0].Close();
  });
  std::thread other = Trainer(1, 3);
  std::thread replacement;
  replace_ = [&](int rank) {
    if (rank != 0 || replacement.joinable()) return;
    dying.join();
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    hub_ends_.emplace_back(ends[0]);
    trainer_ends_[0] = FileDescriptor(ends[1]);
    replacement = Trainer(0, 3, 2);
    hub_->Replace(0, ends[0]);
  };
  Run();
  other.join();
  replacement.join();
  EXPECT_TRUE(begun_[0].summed);
  EXPECT_EQ(begun_[0].round, 0);
  EXPECT_THAT(begun_[0].dense_state, ElementsAre(7, 8));
  EXPECT_THAT(rounds_, ElementsAre(0, 1, 2));
  EXPECT_EQ(generations_[1], 2u);
}

TEST_F(HubTest, DropsATrainerThatSendsWhatNobodyWaitsFor) {
  Start(1);
  ASSERT_TRUE(SendFrame(trainer_ends_[0].get(), Frame::kApplied, Encode(RoundReport())).ok());
  Run();
  EXPECT_THAT(gone_, ElementsAre(0));
  EXPECT_THAT(reports_, ElementsAre("0 sent a message that nobody waits for"));
}

TEST_F(HubTest, PassesReportsOn) {
  Start(1);
  SocketGroup(trainer_ends_[0].get()).Report("waits");
  trainer_ends_[0].Close();
  Run();
  EXPECT_THAT(reports_, ElementsAre("0 waits"));
}

TEST(DecodeTest, NoticesWhatIsMissingOrTooMuch) {
  const Contribution contribution{
      .round = 3, .generation = 1, .examples = 2, .gradient = {1, 2}, .logits = {3}, .labels = {0}};
  const std::string bytes = Encode(contribution);
  Contribution decoded;
  ASSERT_TRUE(Decode(bytes, &decoded));
  EXPECT_EQ(decoded.gradient, contribution.gradient);
  EXPECT_EQ(decoded.labels, contribution.labels);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(Decode(std::string_view(bytes).substr(0, size), &decoded)) << size;
  }
  EXPECT_FALSE(Decode(bytes + "x", &decoded));
  EXPECT_FALSE(Decode(std::string(24, '\0') + std::string(8, '\xff'), &decoded))
      << "negative length";
}

}  // namespace hub_test
}  // namespace emberd::demo
