// Each trainer has a coordinator of its own on its machine; shards are elsewhere. Here they are on
// the same machine too, but share no memory. A failure means that a trainer's arrays go through a
// socket although its coordinator is beside it, that shards of other machines are taken for near
// ones, or that a coordinator or trainer that is killed costs its group a bit, or memory.
#include <csignal>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

#include "absl/strings/numbers.h"
#include "base/status.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"
#include "tests/testing/footprint.h"
#include "tests/testing/process.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace sidecar_test {

using ::testing::AnyOf;
using ::testing::HasSubstr;

using client::TransportKind;

constexpr int kRanks = 2;
constexpr int64_t kBatch = 8192;  // of all ranks: what travels is worth sharing, to shards too
constexpr int64_t kSteps = 10;
constexpr int64_t kBroken = 5;  // the step in which something happens
constexpr int64_t kRows[] = {5000, 20'000};
constexpr int64_t kIdsOfSample[] = {1, 2};
constexpr char kModel[] = R"pb(
  name: "NAME"
  optimizer {
    learning_rate: 0.1
    adagrad {}
  }
  tables { name: "user" vocabulary_size: 5000 embedding_dim: 16 }
  tables { name: "item" vocabulary_size: 20000 embedding_dim: 32 }
  features { name: "user" table: "user" }
  features { name: "item" table: "item" }
)pb";

uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// What coordinators give to trainers, and shards to coordinators.
int FromCoordinator(pid_t pid) { return RegionsOf(pid, "emberd"); }
int FromShard(pid_t pid) { return RegionsOf(pid, "emberd-shard"); }

// A rank of the group "run". Ids and gradients are functions of the step and of the sample's place
// in the batch of all ranks.
class Trainer {
 public:
  Trainer(int rank, int size) : rank_(rank), size_(size) {}

  absl::Status Connect(const std::string& address, TransportKind transport,
                       const std::string& model) {
    client::ClientOptions options;
    options.addresses = {address};
    options.transport = transport;
    options.connect_timeout = kPatience;
    ASSIGN_OR_RETURN(client_, client::Client::Connect(options));
    std::string text = kModel;
    text.replace(text.find("NAME"), 4, model);
    ASSIGN_OR_RETURN(model_, client_->DeclareModel(text));
    return absl::OkStatus();
  }

  // Again and again: other ranks may not know yet that they have to, too.
  absl::Status Join() {
    absl::Status status;
    Eventually([&] {
      stream_.reset();
      auto stream = client_->Train(*model_, {.group = "run", .rank = rank_, .size = size_});
      status = stream.status();
      if (stream.ok()) stream_ = *std::move(stream);
      return status.ok() || !(absl::IsUnavailable(status) || absl::IsAborted(status));
    });
    return status;
  }
  int64_t next_step() const { return stream_->next_step(); }

  // Beside the stream; changes nothing.
  absl::Status LookUpOnly() {
    const std::vector<int64_t> ids(kBatch);
    return client_
        ->Lookup(*model_,
                 {{"user", client::DenseIds{absl::MakeConstSpan(ids)}},
                  {"item", client::DenseIds{absl::MakeConstSpan(ids)}}},
                 {.inference = true})
        .status();
  }
  absl::Status SendLookup(int64_t step) {
    std::vector<std::vector<int64_t>> ids(2);
    for (int f = 0; f < 2; ++f) {
      for (int64_t i = first() * kIdsOfSample[f]; i < end() * kIdsOfSample[f]; ++i) {
        ids[f].push_back(static_cast<int64_t>(Mix((step * 2 + f) << 32 | i) % kRows[f]));
      }
    }
    return stream_->SendLookup(
        step, {{"user", client::DenseIds{absl::MakeConstSpan(ids[0]), kIdsOfSample[0]}},
               {"item", client::DenseIds{absl::MakeConstSpan(ids[1]), kIdsOfSample[1]}}});
  }
  absl::Status ReceiveLookup() {
    ASSIGN_OR_RETURN(found_, stream_->ReceiveLookup());
    return absl::OkStatus();
  }
  absl::Status SendUpdate(int64_t step) {
    std::vector<std::vector<float>> values;
    std::vector<client::FeatureGradient> gradients;
    for (const client::Activation& activation : found_->activations) {
      std::vector<float>& gradient = values.emplace_back();
      for (size_t i = 0; i < activation.values.size(); ++i) {
        const uint64_t noise = Mix(step << 40 | (first() * activation.dim + i));
        gradient.push_back(0.5f * activation.values[i] +
                           static_cast<float>(noise >> 40) * 0x1p-24f - 0.5f);
      }
      gradients.push_back({activation.feature, gradient, activation.samples});
    }
    return stream_->SendUpdate(step, gradients);
  }
  absl::Status ReceiveUpdate() { return stream_->ReceiveUpdate().status(); }

  absl::Status Step(int64_t step) {
    RETURN_IF_ERROR(SendLookup(step));
    RETURN_IF_ERROR(ReceiveLookup());
    RETURN_IF_ERROR(SendUpdate(step));
    return ReceiveUpdate();
  }
  // From the step that the group is at.
  absl::Status JoinAndTrain(int64_t end) {
    RETURN_IF_ERROR(Join());
    for (int64_t step = next_step(); step < end; ++step) RETURN_IF_ERROR(Step(step));
    return absl::OkStatus();
  }
  absl::Status Finish() { return stream_->Finish(); }
  std::string TableDigest() { return Digest(*client_, *model_).value_or("none"); }

 private:
  int64_t first() const { return kBatch * rank_ / size_; }
  int64_t end() const { return kBatch * (rank_ + 1) / size_; }

  const int rank_, size_;
  std::unique_ptr<client::Client> client_;
  std::optional<client::Model> model_;
  std::unique_ptr<client::TrainStream> stream_;
  std::optional<client::TrainLookupResult> found_;
};

class SidecarTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto cluster =
        Cluster::Start({.shards = 2, .coordinators = kRanks, .shard_config = "transport: TCP"});
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    // One trainer with the batches of both, on plain TCP.
    Trainer alone(0, 1);
    ASSERT_TRUE(alone.Connect(cluster_->address(0), TransportKind::kTcp, "alone").ok());
    const absl::Status status = alone.JoinAndTrain(kSteps);
    ASSERT_TRUE(status.ok()) << status;
    expected_ = alone.TableDigest();
    ASSERT_EQ(expected_.size(), 64u);
    for (int rank = 0; rank < kRanks; ++rank) {
      ASSERT_EQ(FromCoordinator(Sidecar(rank)), 0);
      ranks_.emplace_back(rank, kRanks);
      const absl::Status connected =
          ranks_[rank].Connect(cluster_->address(rank), TransportKind::kAuto, "model");
      ASSERT_TRUE(connected.ok()) << connected;
    }
  }

  pid_t Sidecar(int rank) { return cluster_->coordinator_process(rank)->pid(); }

  // `work` of every rank, on threads.
  template <typename Work>
  void OnAll(const Work& work) {
    std::vector<std::thread> threads;
    for (Trainer& trainer : ranks_) {
      threads.emplace_back([&] {
        const absl::Status status = work(trainer);
        EXPECT_TRUE(status.ok()) << status;
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  void TrainAll(int64_t end) {
    OnAll([end](Trainer& trainer) { return trainer.JoinAndTrain(end); });
  }

  void ExpectMemoryIsSharedWithTrainersAlone() {
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_GT(FromCoordinator(Sidecar(rank)), 0) << rank;
      EXPECT_EQ(FromShard(Sidecar(rank)), 0) << rank;
    }
    for (int shard = 0; shard < 2; ++shard) {
      const pid_t pid = cluster_->shard_process(shard)->pid();
      EXPECT_EQ(FromShard(pid) + FromCoordinator(pid), 0) << shard;
    }
  }

  std::unique_ptr<Cluster> cluster_;
  std::string expected_;
  std::vector<Trainer> ranks_;
};

TEST_F(SidecarTest, MemoryIsSharedWithTrainersAloneAndTablesHaveTheSameBits) {
  TrainAll(kSteps);
  ExpectMemoryIsSharedWithTrainersAlone();
  EXPECT_GE(FromCoordinator(getpid()), kRanks);
  OnAll([](Trainer& trainer) { return trainer.Finish(); });
  EXPECT_EQ(ranks_[0].TableDigest(), expected_);
  ranks_.clear();
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_TRUE(Eventually([&] { return FromCoordinator(Sidecar(rank)) == 0; })) << rank;
  }
}

// How far the trainer is in its step when its coordinator is killed.
enum class Moment { kLookupSent, kLookedUp, kUpdateSent };

class KilledSidecarTest : public SidecarTest, public ::testing::WithParamInterface<Moment> {};

TEST_P(KilledSidecarTest, TheGroupGoesOnWithTheSameBits) {
  TrainAll(kBroken);
  absl::Status others, joined;
  std::thread other([&] {
    others = ranks_[0].Step(kBroken);
    joined = ranks_[0].Join();
  });
  Trainer& trainer = ranks_[1];
  ASSERT_TRUE(trainer.SendLookup(kBroken).ok());
  if (GetParam() != Moment::kLookupSent) {
    ASSERT_TRUE(trainer.ReceiveLookup().ok());
  }
  if (GetParam() == Moment::kUpdateSent) {
    ASSERT_TRUE(trainer.SendUpdate(kBroken).ok());
  }
  cluster_->KillCoordinator(1);
  absl::Status own;
  if (GetParam() == Moment::kLookupSent) own = trainer.ReceiveLookup();
  if (own.ok() && GetParam() != Moment::kUpdateSent) own = trainer.SendUpdate(kBroken);
  if (own.ok()) own = trainer.ReceiveUpdate();
  EXPECT_TRUE(cluster_->RestartCoordinator(1).ok());
  // The other rank hears of it at once, or at the latest when this one comes again.
  const absl::Status again = trainer.Join();
  EXPECT_TRUE(again.ok()) << again;
  other.join();
  ASSERT_TRUE(joined.ok()) << joined;
  if (GetParam() == Moment::kUpdateSent) {
    // The step may have been complete by then.
    EXPECT_TRUE(own.ok() || absl::IsUnavailable(own)) << own;
    EXPECT_TRUE(others.ok() || absl::IsAborted(others)) << others;
  } else {
    EXPECT_TRUE(absl::IsUnavailable(own)) << own;
    EXPECT_TRUE(absl::IsAborted(others)) << others;
    EXPECT_THAT(std::string(others.message()),
                AnyOf(HasSubstr("(its coordinator is gone)"), HasSubstr("rank 1 joined again")));
  }
  EXPECT_EQ(ranks_[0].next_step(), ranks_[1].next_step());
  EXPECT_GE(ranks_[0].next_step(), kBroken);
  EXPECT_LE(ranks_[0].next_step(), kBroken + (GetParam() == Moment::kUpdateSent ? 1 : 0));
  OnAll([](Trainer& rank) {
    for (int64_t step = rank.next_step(); step < kSteps; ++step) RETURN_IF_ERROR(rank.Step(step));
    return absl::OkStatus();
  });
  // The client may have asked for memory before the coordinator was there, and asks again later.
  EXPECT_TRUE(
      Eventually([&] { return trainer.LookUpOnly().ok() && FromCoordinator(Sidecar(1)) > 0; }));
  ExpectMemoryIsSharedWithTrainersAlone();
  EXPECT_EQ(ranks_[0].TableDigest(), expected_);
}

INSTANTIATE_TEST_SUITE_P(, KilledSidecarTest,
                         ::testing::Values(Moment::kLookupSent, Moment::kLookedUp,
                                           Moment::kUpdateSent));

// Where a trainer that is to be killed finds its coordinator.
constexpr char kAddress[] = "EMBERD_SIDECAR_ADDRESS";

// Not a test: rank 1, in a process of its own.
TEST(TrainerWithSidecar, Trains) {
  const char* const address = std::getenv(kAddress);
  if (address == nullptr) GTEST_SKIP() << "a part of another test";
  Trainer trainer(1, kRanks);
  ASSERT_TRUE(trainer.Connect(address, TransportKind::kAuto, "model").ok());
  const absl::Status status = trainer.JoinAndTrain(kSteps);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(trainer.Finish().ok());
}

TEST_F(SidecarTest, AKilledTrainerLeavesNothingAtItsCoordinatorAndComesBack) {
  ranks_.pop_back();
  Trainer& survivor = ranks_[0];
  auto folder = TempDir::Create();
  ASSERT_TRUE(folder.ok());
  setenv(kAddress, cluster_->address(1).c_str(), /*replace=*/1);
  const auto start = [&] {
    return StartProcess({"/proc/self/exe", "--gtest_filter=TrainerWithSidecar.Trains"},
                        folder->Path("log"));
  };
  auto killed = start();
  ASSERT_TRUE(killed.ok()) << killed.status();
  const absl::Status begun = survivor.JoinAndTrain(kBroken);
  ASSERT_TRUE(begun.ok()) << begun;
  ASSERT_TRUE(survivor.SendLookup(kBroken).ok());
  ASSERT_TRUE(survivor.ReceiveLookup().ok());
  EXPECT_GT(FromCoordinator(Sidecar(1)), 0);
  EXPECT_GT(FromCoordinator((*killed)->pid()), 0);
  (*killed)->Stop(absl::ZeroDuration());  // it waits for our gradients
  EXPECT_TRUE(Eventually([&] { return FromCoordinator(Sidecar(1)) == 0; }))
      << FromCoordinator(Sidecar(1));
  absl::Status told = survivor.SendUpdate(kBroken);
  if (told.ok()) told = survivor.ReceiveUpdate();
  if (told.ok()) told = survivor.Step(kBroken + 1);  // its gradients had come
  EXPECT_TRUE(absl::IsAborted(told)) << told;
  EXPECT_THAT(std::string(told.message()), HasSubstr("rank 1"));
  EXPECT_GT(FromCoordinator(Sidecar(0)), 0);

  auto again = start();
  unsetenv(kAddress);
  ASSERT_TRUE(again.ok()) << again.status();
  const absl::Status ended = survivor.JoinAndTrain(kSteps);
  EXPECT_TRUE(ended.ok()) << ended;
  EXPECT_TRUE(survivor.Finish().ok());
  ASSERT_TRUE((*again)->WaitFor(kPatience));
  EXPECT_EQ((*again)->exit_status(), 0) << ReadFile(folder->Path("log"));
  EXPECT_EQ(survivor.TableDigest(), expected_);
}

}  // namespace sidecar_test
}  // namespace emberd::testing
