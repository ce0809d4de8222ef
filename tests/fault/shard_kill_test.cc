// A shard that dies, or falls silent, while trainers run. A failure here means that a call hangs
// beyond its deadline, that the error does not say which shard is gone, that training does not go
// on once the shard is back, or that something was applied in part and then kept.
#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <signal.h>

#include "absl/strings/str_cat.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/metrics.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace shard_kill_test {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kShards = 4;
constexpr int kVictim = 2;

class ShardKillTest : public ClusterFixture {
 protected:
  void SetUp() override {
    StartCluster({.shards = kShards, .sparsecores_per_shard = 2}, MixedModel("mixed"));
  }

  // A client that reports every error at once.
  std::unique_ptr<client::Client> ConnectWithoutRetries(absl::Duration deadline = kPatience) {
    client::ClientOptions options = cluster_->client_options();
    options.max_attempts = 1;
    options.deadline = deadline;
    absl::StatusOr<std::unique_ptr<client::Client>> client = client::Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }
  absl::StatusOr<client::LookupResult> Lookup(client::Client& client, uint64_t seed) {
    const std::vector<OwnedIds> batch = MixedBatch(seed, 32);
    return client.Lookup(model_, Features(batch));
  }
  absl::Status Apply(client::Client& client, const client::LookupResult& found) {
    const std::vector<std::vector<float>> gradients = MixedGradients(1, found);
    return client.ApplyGradients(model_, found.batch, Gradients(found, gradients)).status();
  }
  // Whether training works again, in time.
  bool Recovers(client::Client& client) {
    return Await([&] { return TrainStep(client, model_, 7, 32); }).ok();
  }
  // Whether the coordinator has no request in progress before long.
  bool CoordinatorComesToRest() {
    return Eventually([&] {
      const std::string page = FetchMetrics(cluster_->http_address());
      return !page.empty() && MetricSum(page, "emberd_in_flight_requests") == 0;
    });
  }
};

TEST_F(ShardKillTest, TheErrorNamesTheShard) {
  std::unique_ptr<client::Client> client = ConnectWithoutRetries();
  absl::StatusOr<client::LookupResult> found = Lookup(*client, 1);
  ASSERT_TRUE(found.ok()) << found.status();
  cluster_->KillShard(kVictim);
  const absl::Status statuses[] = {
      Apply(*client, *found), Lookup(*client, 2).status(),
      client->ReadRows(model_, "users", {0, 1, 2, 3, 4, 5, 6, 7}).status(),
      Digest(*client, model_).status()};
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("shard ", kVictim)));
    EXPECT_THAT(std::string(status.message()), HasSubstr(cluster_->shard_address(kVictim)));
  }
  // Those that are there may be too busy to say so in the second that the coordinator gives them.
  const auto cluster = Await(
      [&] { return client->GetStatus(); },
      [](const absl::StatusOr<client::ClusterStatus>& seen) {
        return seen.ok() &&
               std::count_if(seen->shards.begin(), seen->shards.end(),
                             [](const auto& shard) { return shard.reachable; }) == kShards - 1;
      });
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  for (const client::ShardStatus& shard : cluster->shards) {
    EXPECT_EQ(shard.reachable, shard.index != kVictim) << shard.index;
    EXPECT_EQ(shard.error.empty(), shard.index != kVictim) << shard.index;
  }
}

TEST_F(ShardKillTest, TrainingGoesOnAfterAReset) {
  std::vector<int64_t> ids;
  for (int64_t id = 0; id < 64; ++id) ids.push_back(id);
  absl::StatusOr<client::RowValues> initial = client_->ReadRows(model_, "users", ids);
  ASSERT_TRUE(initial.ok()) << initial.status();
  for (uint64_t step = 0; step < 10; ++step) {
    ASSERT_TRUE(TrainStep(*client_, model_, step, 32).ok());
  }
  absl::StatusOr<client::LookupResult> stale = Lookup(*client_, 3);
  ASSERT_TRUE(stale.ok()) << stale.status();
  cluster_->KillShard(kVictim);
  ASSERT_TRUE(cluster_->RestartShard(kVictim).ok());

  // Its rows are gone. Nothing is applied to the other shards alone, and nobody reads a mixture.
  for (const absl::Status& status :
       {Apply(*client_, *stale), client_->ReadRows(model_, "users", ids).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("shard ", kVictim)));
  }
  const absl::Status reset = client_->ResetModel("mixed");
  ASSERT_TRUE(reset.ok()) << reset;
  absl::StatusOr<client::RowValues> after = client_->ReadRows(model_, "users", ids);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->values, initial->values) << "on all shards";
  EXPECT_TRUE(TrainStep(*client_, model_, 4, 32).ok());
}

TEST_F(ShardKillTest, TrainersSurviveAKill) {
  constexpr int kTrainers = 2;
  std::atomic<bool> stop = false;
  std::atomic<int> good = 0, unavailable = 0, lost = 0;
  std::vector<std::thread> trainers;
  for (int t = 0; t < kTrainers; ++t) {
    trainers.emplace_back([&, t] {
      std::unique_ptr<client::Client> client = ConnectWithoutRetries(absl::Seconds(5));
      for (uint64_t step = 0; !stop; ++step) {
        const absl::Status status = TrainStep(*client, model_, step * kTrainers + t, 32);
        if (status.ok()) {
          ++good;
        } else if (absl::IsDeadlineExceeded(status)) {
          ++unavailable;  // all had voted, and the victim died before it was told to commit
        } else if (absl::IsUnavailable(status)) {
          ++unavailable;
          // Or another trainer resets the model at this moment.
          EXPECT_THAT(std::string(status.message()),
                      AnyOf(HasSubstr(absl::StrCat("shard ", kVictim)), HasSubstr("reset")));
        } else {
          // Until the reset, and a batch from before it.
          EXPECT_TRUE(absl::IsDataLoss(status) || absl::IsAborted(status)) << status;
          ++lost;
        }
      }
    });
  }
  const auto wait_for = [](const std::atomic<int>& counter, int more) {
    const int goal = counter + more;
    return Eventually([&] { return counter >= goal; });
  };
  for (int round = 0; round < 3; ++round) {
    EXPECT_TRUE(wait_for(good, 20)) << "round " << round;
    cluster_->KillShard(kVictim);
    EXPECT_TRUE(wait_for(unavailable, 4)) << "round " << round;
    const absl::Status status = cluster_->RestartShard(kVictim);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(wait_for(lost, 2)) << "round " << round;
    const absl::Status reset = client_->ResetModel("mixed");
    ASSERT_TRUE(reset.ok()) << reset;
  }
  EXPECT_TRUE(wait_for(good, 20));
  stop = true;
  for (std::thread& trainer : trainers) trainer.join();
  // Batches of failed updates do not pile up for ever, and every process still obeys.
  const absl::Status stopped = cluster_->Stop(kPatience);
  EXPECT_TRUE(stopped.ok()) << stopped;
}

// A process that is there but does not answer is worse than a dead one: no connection breaks.
TEST_F(ShardKillTest, ASilentShardEndsCallsAtTheirDeadline) {
  std::unique_ptr<client::Client> client = ConnectWithoutRetries();
  cluster_->SuspendShard(kVictim);
  client::LookupOptions options;
  options.deadline = absl::Seconds(3);
  const std::vector<OwnedIds> batch = MixedBatch(1, 32);
  const absl::Status status = client->Lookup(model_, Features(batch), options).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status)) << status;
  absl::StatusOr<client::ClusterStatus> cluster = client->GetStatus();
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EXPECT_FALSE(cluster->shards[kVictim].reachable);
  cluster_->ResumeShard(kVictim);
  EXPECT_TRUE(Recovers(*client));
}

// An update that could not reach all shards has reached none.
TEST_F(ShardKillTest, AnUpdateIsAllOrNothingWhenAShardIsSilent) {
  std::unique_ptr<client::Client> client = ConnectWithoutRetries();
  absl::StatusOr<client::LookupResult> found = Lookup(*client, 1);
  ASSERT_TRUE(found.ok()) << found.status();
  const std::string before = *Digest(*client_, model_);
  client::ApplyOptions options;
  options.sequence = client->NextSequence();
  options.deadline = absl::Seconds(1);
  const std::vector<std::vector<float>> gradients = MixedGradients(1, *found);
  const std::vector<client::FeatureGradient> sent = Gradients(*found, gradients);
  cluster_->SuspendShard(kVictim);
  EXPECT_FALSE(client->ApplyGradients(model_, found->batch, sent, options).ok());
  // A shard that wakes before the coordinator has given up may still take part, and then all do.
  EXPECT_TRUE(CoordinatorComesToRest());
  cluster_->ResumeShard(kVictim);
  EXPECT_EQ(*Digest(*client_, model_), before);
  // The same update can be sent again, and then it happens, once.
  options.deadline = kPatience;
  const auto applied =
      Await([&] { return client->ApplyGradients(model_, found->batch, sent, options); },
            [](const auto& tried) { return !absl::IsUnavailable(tried.status()); });
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_FALSE(applied->replayed);
  EXPECT_NE(*Digest(*client_, model_), before);
}

// A network that is cut tells nobody: no connection breaks. What this would catch: a coordinator
// that believes in its connection until the deadline of a call, or takes rows for lost that are
// not.
class CutNetworkTest : public ShardKillTest {
 protected:
  void SetUp() override {
    StartCluster({.shards = kShards, .config = "transport: TCP", .links = true},
                 MixedModel("mixed"));
  }
};

TEST_F(CutNetworkTest, CallsEndWithoutTheShardAndItsRowsAreThereAfterwards) {
  std::unique_ptr<client::Client> client = ConnectWithoutRetries();
  ASSERT_TRUE(TrainStep(*client, model_, 1, 32).ok());
  const std::string before = TableDigest();
  cluster_->shard_link(0, kVictim).Stall();
  // The shard never answers, and the deadline is far.
  const absl::Status status = Lookup(*client, 2).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("shard ", kVictim)));
  cluster_->shard_link(0, kVictim).Heal();
  const absl::StatusOr<std::string> after = Await([&] { return Digest(*client, model_); });
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(*after, before);
  EXPECT_TRUE(Recovers(*client));
}

// What stays behind when a cluster goes: nothing.
TEST(ClusterTest, NoProcessIsLeft) {
  std::vector<pid_t> pids;
  {
    absl::StatusOr<std::unique_ptr<Cluster>> cluster = Cluster::Start({.shards = 2});
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    pids = (*cluster)->pids();
    EXPECT_EQ(pids.size(), 3u);
  }
  for (const pid_t pid : pids) EXPECT_EQ(kill(pid, 0), -1) << pid;
}

}  // namespace shard_kill_test
}  // namespace emberd::testing
