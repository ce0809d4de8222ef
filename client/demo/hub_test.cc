#include "client/demo/hub.h"

#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include "client/demo/descriptor.h"

namespace emberd::demo {
namespace {

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
        sockets, Hub::Events{.on_sum =
                                 [this](const auto& contributions, const auto& sum) {
                                   sums_.push_back(sum);
                                   contributions_.push_back(contributions.size());
                                 },
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
                             .on_gone = [this](int rank) { gone_.push_back(rank); }});
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

  // A trainer that does `rounds` rounds and goes. order_ records who applied when.
  std::thread Trainer(int rank, int64_t rounds) {
    return std::thread([this, rank, rounds] {
      SocketGroup group(trainer_ends_[rank].get());
      for (int64_t round = 0; round < rounds; ++round) {
        Contribution contribution{
            .round = round, .examples = 10 + rank, .gradient = {1.0f, static_cast<float>(rank)}};
        const auto sum = group.Reduce(contribution);
        if (!sum.ok() || !group.AwaitTurn().ok()) break;
        order_.push_back(rank);  // by the hub's turns one trainer at a time
        if (!group.Finish({.rows_updated = 100 * round + rank}).ok()) break;
      }
      trainer_ends_[rank].Close();
    });
  }

  std::vector<Descriptor> hub_ends_, trainer_ends_;
  std::unique_ptr<Hub> hub_;
  std::vector<GradientSum> sums_;
  std::vector<size_t> contributions_;
  std::vector<int64_t> rounds_, rows_;
  std::vector<std::string> reports_;
  std::vector<int> gone_, order_;
};

TEST_F(HubTest, SumsAndGivesTurnsInOrderOfRank) {
  Start(3);
  std::thread trainers[] = {Trainer(0, 2), Trainer(1, 2), Trainer(2, 2)};
  Run();
  for (std::thread& trainer : trainers) trainer.join();
  ASSERT_EQ(sums_.size(), 2u);
  EXPECT_EQ(sums_[0].examples, 33);
  EXPECT_THAT(sums_[0].gradient, ElementsAre(3.0f, 3.0f));
  EXPECT_THAT(order_, ElementsAre(0, 1, 2, 0, 1, 2));
  EXPECT_THAT(rounds_, ElementsAre(0, 1));
  EXPECT_THAT(rows_, ElementsAre(0, 1, 2, 100, 101, 102));
}

// A trainer that dies must not hang the others, whatever it was about to do.
TEST_F(HubTest, GoesOnWithoutATrainerThatIsGone) {
  Start(2);
  std::thread trainers[] = {Trainer(0, 1), Trainer(1, 4)};
  Run();
  for (std::thread& trainer : trainers) trainer.join();
  EXPECT_EQ(gone_.front(), 0);
  EXPECT_EQ(rounds_.size(), 4u);
  EXPECT_EQ(sums_.back().examples, 11);
  EXPECT_EQ(contributions_.back(), 1u);
}

TEST_F(HubTest, GoesOnWhenATrainerDiesInItsTurn) {
  Start(2);
  std::thread dying([this] {
    SocketGroup group(trainer_ends_[0].get());
    EXPECT_TRUE(group.Reduce({.round = 0, .examples = 1, .gradient = {1, 1}}).ok());
    EXPECT_TRUE(group.AwaitTurn().ok());
    trainer_ends_[0].Close();
  });
  std::thread other = Trainer(1, 3);
  Run();
  dying.join();
  other.join();
  EXPECT_THAT(order_, ElementsAre(1, 1, 1));
}

TEST_F(HubTest, DropsATrainerThatSpeaksOutOfTurn) {
  Start(2);
  ASSERT_TRUE(SendFrame(trainer_ends_[0].get(), kApplied, Encode(RoundReport())).ok());
  std::thread other = Trainer(1, 2);
  Run();
  other.join();
  EXPECT_EQ(gone_.front(), 0);
  EXPECT_EQ(rounds_.size(), 2u);
}

TEST_F(HubTest, PassesReportsOn) {
  Start(1);
  SocketGroup(trainer_ends_[0].get()).Report("waits");
  trainer_ends_[0].Close();
  Run();
  EXPECT_THAT(reports_, ElementsAre("0 waits"));
}

TEST(WireTest, UnpackerNoticesWhatIsMissingOrTooMuch) {
  const Contribution contribution{
      .round = 3, .examples = 2, .gradient = {1, 2}, .logits = {3}, .labels = {0}};
  const std::string bytes = Encode(contribution);
  Contribution decoded;
  ASSERT_TRUE(Decode(bytes, &decoded));
  EXPECT_EQ(decoded.gradient, contribution.gradient);
  EXPECT_EQ(decoded.labels, contribution.labels);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(Decode(std::string_view(bytes).substr(0, size), &decoded)) << size;
  }
  EXPECT_FALSE(Decode(bytes + "x", &decoded));
  EXPECT_FALSE(Decode(std::string(16, '\0') + std::string(8, '\xff'), &decoded))
      << "negative length";
}

}  // namespace
}  // namespace emberd::demo
