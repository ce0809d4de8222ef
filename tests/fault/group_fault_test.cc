// Ranks of a synchronous group that are slow, dead, doubled or late, and coordinators that die. A
// failure here means that a waiting rank hangs or is not told who is missing, that a step was made
// from some of its parts, that the group cannot go on from the same step, or that failed steps
// leave something behind.
#include <latch>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/await.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster_fixture.h"
#include "tests/testing/footprint.h"
#include "tests/testing/group_training.h"
#include "tests/testing/metrics.h"
#include "tests/testing/training.h"

namespace emberd::testing {
namespace group_fault_test {

using ::testing::HasSubstr;

constexpr int kRanks = 3;
// Of tests in which it passes; in all others it does not.
constexpr absl::Duration kShort = absl::Seconds(10);

// One trainer: a client and a stream of its own.
struct Rank {
  std::unique_ptr<client::Client> client;
  std::unique_ptr<client::TrainStream> stream;
};

class GroupFaultTest : public ClusterFixture {
 protected:
  explicit GroupFaultTest(std::string config = "timeouts { batch_ttl_ms: 8000 }")
      : config_(std::move(config)) {}

  void SetUp() override {
    StartCluster({.shards = 2, .sparsecores_per_shard = 4, .coordinators = 2, .config = config_},
                 GroupModel("m", 4));
  }

  absl::Status Open(int rank, int coordinator) {
    ranks_[rank].stream.reset();
    client::ClientOptions options = cluster_->client_options();
    options.addresses = {cluster_->address(coordinator)};
    auto client = client::Client::Connect(options);
    if (!client.ok()) return client.status();
    ranks_[rank].client = *std::move(client);
    auto stream = ranks_[rank].client->Train(
        model_, {.group = "run", .rank = rank, .size = kRanks, .step_timeout = step_timeout_});
    if (!stream.ok()) return stream.status();
    ranks_[rank].stream = *std::move(stream);
    return absl::OkStatus();
  }

  // Runs `work` for each rank on a thread; statuses by rank.
  template <typename Work>
  std::vector<absl::Status> OnAll(const Work& work) {
    std::vector<absl::Status> statuses(kRanks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] { statuses[rank] = work(rank); });
    }
    for (std::thread& thread : threads) thread.join();
    return statuses;
  }

  // All ranks join, rank r through coordinator `first + r` modulo their number; the step they are
  // at.
  int64_t JoinAll(int first = 0, int coordinators = 2) {
    for (const absl::Status& status :
         OnAll([&](int rank) { return Open(rank, first + rank % coordinators); })) {
      EXPECT_TRUE(status.ok()) << status;
      if (!status.ok()) return -1;
    }
    return ranks_[0].stream->next_step();
  }

  absl::Status Run(int rank, int64_t begin, int64_t end) {
    return RunSteps(*ranks_[rank].stream, rank, kRanks, begin, end, /*pipelined=*/false);
  }
  void RunAll(int64_t begin, int64_t end) {
    for (const absl::Status& status : OnAll([&](int rank) { return Run(rank, begin, end); })) {
      EXPECT_TRUE(status.ok()) << status;
    }
  }
  absl::Status SendLookup(int rank, int64_t step) {
    return ranks_[rank].stream->SendLookup(step, MakeShare(step, rank, kRanks).Features());
  }

  bool EventuallyServes() {
    return Eventually([&] {
      bool all = true;
      for (int i = 0; i < 2; ++i) {
        client::ClientOptions options = cluster_->client_options();
        options.addresses = {cluster_->address(i)};
        auto client = client::Client::Connect(options);
        absl::StatusOr<client::ClusterStatus> status = absl::UnavailableError("");
        if (client.ok()) status = (*client)->GetStatus();
        all = all && status.ok();
        for (size_t s = 0; all && s < status->shards.size(); ++s) all = status->shards[s].reachable;
      }
      return all;
    });
  }

  // Ranks wait for others by calls to the shard that hosts the group.
  double CallsToShards() {
    double calls = 0;
    for (const int shard : {0, 1}) {
      const std::string page = FetchMetrics(cluster_->shard_http_address(shard));
      calls += MetricSum(page, "emberd_in_flight_requests");
    }
    return calls;
  }

  // What the steps before `step` leave when nothing goes wrong, from another model of its own.
  std::string TablesAfter(int64_t step) {
    auto model = client_->DeclareModel(GroupModel(absl::StrCat("reference", step), 4));
    if (!model.ok()) return model.status().ToString();
    const absl::Status status =
        TrainGroup(*cluster_, *model, {.group = "reference", .size = 1}, 1, step);
    return status.ok() ? Digest(*client_, *model).value_or("no digest") : status.ToString();
  }

  absl::Duration step_timeout_ = kPatience;
  const std::string config_;
  std::map<int, Rank> ranks_ = [] {
    std::map<int, Rank> ranks;
    for (int rank = 0; rank < kRanks; ++rank) ranks[rank];
    return ranks;
  }();
};

TEST_F(GroupFaultTest, ASlowRankIsWaitedForAndNamed) {
  ASSERT_EQ(JoinAll(), 0);
  ASSERT_TRUE(Eventually([&] { return CallsToShards() == 0; }));
  const std::vector<absl::Status> statuses = OnAll([&](int rank) -> absl::Status {
    if (rank == 2) {
      EXPECT_TRUE(Eventually([&] { return CallsToShards() == 2; })) << "the others wait";
      absl::SleepFor(absl::Milliseconds(200));
    }
    if (absl::Status status = SendLookup(rank, 0); !status.ok()) return status;
    auto found = ranks_[rank].stream->ReceiveLookup();
    if (!found.ok()) return found.status();
    EXPECT_EQ(found->times.slowest_rank, 2);
    if (rank != 2) {
      EXPECT_GT(found->times.wait_for_ranks, absl::Milliseconds(100));
    }
    return absl::OkStatus();
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

TEST_F(GroupFaultTest, ADeadRankEndsTheStepForAllAndTheGroupGoesOn) {
  ASSERT_EQ(JoinAll(), 0);
  RunAll(0, 5);
  const std::string before = TableDigest();
  const std::vector<absl::Status> statuses = OnAll([&](int rank) -> absl::Status {
    if (rank == 1) {
      // Dies after its lookup, with the parts of the others on the shards or not.
      absl::Status status = SendLookup(rank, 5);
      if (status.ok()) status = ranks_[rank].stream->ReceiveLookup().status();
      ranks_[rank].stream.reset();
      return status;
    }
    return Run(rank, 5, 6);
  });
  EXPECT_TRUE(statuses[1].ok()) << statuses[1];
  for (const int rank : {0, 2}) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kAborted) << statuses[rank];
    EXPECT_THAT(std::string(statuses[rank].message()), HasSubstr("rank 1"));
  }
  EXPECT_EQ(TableDigest(), before);
  ASSERT_EQ(JoinAll(), 5);
  RunAll(5, 8);
  EXPECT_EQ(TableDigest(), TablesAfter(8));
}

TEST_F(GroupFaultTest, ASilentRankIsNamedAtTheDeadlineAndComesTooLate) {
  ASSERT_EQ(JoinAll(), 0);
  RunAll(0, 3);
  const std::string before = TableDigest();
  step_timeout_ = kShort;
  ASSERT_EQ(JoinAll(), 3);
  std::latch told(2);
  const std::vector<absl::Status> statuses = OnAll([&](int rank) -> absl::Status {
    if (rank != 2) {
      absl::Status status = Run(rank, 3, 4);
      told.count_down();
      return status;
    }
    absl::Status status = SendLookup(rank, 3);
    auto found = ranks_[rank].stream->ReceiveLookup();
    told.wait();
    if (!found.ok()) return found.status();
    status = ranks_[rank].stream->SendUpdate(3, {});
    return ranks_[rank].stream->ReceiveUpdate().status();
  });
  for (const int rank : {0, 1}) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kDeadlineExceeded) << statuses[rank];
    EXPECT_THAT(std::string(statuses[rank].message()), HasSubstr("rank 2"));
  }
  EXPECT_FALSE(statuses[2].ok());
  EXPECT_EQ(TableDigest(), before);
  step_timeout_ = kPatience;
  ASSERT_EQ(JoinAll(), 3);
  RunAll(3, 6);
  EXPECT_EQ(TableDigest(), TablesAfter(6));
}

TEST_F(GroupFaultTest, ARankThatJoinsTwiceReplacesItself) {
  ASSERT_EQ(JoinAll(), 0);
  RunAll(0, 2);
  std::map<int, Rank> old = std::move(ranks_);
  for (int rank = 0; rank < kRanks; ++rank) ranks_[rank];
  // Rank 1 comes again, through the other coordinator, while the others wait for its old self.
  std::thread again([&] { EXPECT_TRUE(Open(1, 0).ok()); });
  for (const int rank : {0, 2}) {
    const absl::Status status = RunSteps(*old[rank].stream, rank, kRanks, 2, 3, false);
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 joined again"));
  }
  const absl::Status doubled = RunSteps(*old[1].stream, 1, kRanks, 2, 3, false);
  EXPECT_EQ(doubled.code(), absl::StatusCode::kAborted) << doubled;
  std::thread second([&] { EXPECT_TRUE(Open(2, 0).ok()); });
  EXPECT_TRUE(Open(0, 0).ok());
  again.join();
  second.join();
  ASSERT_EQ(ranks_[0].stream->next_step(), 2);
  RunAll(2, 4);
  EXPECT_EQ(TableDigest(), TablesAfter(4));
  for (auto& [rank, trainer] : old) trainer.stream.reset();  // before their clients
}

TEST_F(GroupFaultTest, ABadRequestOfOneRankFailsTheStepOfAll) {
  ASSERT_EQ(JoinAll(), 0);
  RunAll(0, 2);
  const std::vector<absl::Status> statuses = OnAll([&](int rank) -> absl::Status {
    if (rank != 0) return Run(rank, 2, 3);
    Share share = MakeShare(2, rank, kRanks);
    share.ids[0][0] = 1'000'000;
    absl::Status status = ranks_[rank].stream->SendLookup(2, share.Features());
    return status.ok() ? ranks_[rank].stream->ReceiveLookup().status() : status;
  });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kOutOfRange) << statuses[0];
  for (const int rank : {1, 2}) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kAborted) << statuses[rank];
    EXPECT_THAT(std::string(statuses[rank].message()), HasSubstr("rank 0"));
    EXPECT_THAT(std::string(statuses[rank].message()), HasSubstr("1000000"));
  }
  ASSERT_EQ(JoinAll(), 2);
  RunAll(2, 3);
  EXPECT_EQ(TableDigest(), TablesAfter(3));
}

TEST_F(GroupFaultTest, RanksThatDisagreeAreRefused) {
  ASSERT_EQ(JoinAll(), 0);
  // A step out of turn, and one that is done.
  RunAll(0, 1);
  ASSERT_TRUE(SendLookup(0, 0).ok());
  const absl::Status repeated = ranks_[0].stream->ReceiveLookup().status();
  EXPECT_EQ(repeated.code(), absl::StatusCode::kInvalidArgument) << repeated;
  EXPECT_THAT(std::string(repeated.message()), HasSubstr("step 1"));
  // Another size than the others have.
  for (auto& [rank, trainer] : ranks_) trainer.stream.reset();
  EXPECT_TRUE(Eventually([&] { return CallsToShards() == 0; }));
  client::TrainOptions options{
      .group = "run", .rank = 0, .size = kRanks, .step_timeout = step_timeout_};
  const auto waiting = cluster_->Connect();
  ASSERT_NE(waiting, nullptr);
  absl::Status in_vain;
  std::thread first([&] { in_vain = waiting->Train(model_, options).status(); });
  EXPECT_TRUE(Eventually([&] { return CallsToShards() > 0; }));
  client::TrainOptions other = options;
  other.rank = 1;
  other.size = 2;
  const absl::Status size = client_->Train(model_, other).status();
  EXPECT_EQ(size.code(), absl::StatusCode::kInvalidArgument) << size;
  waiting->CancelCalls();  // nobody else joins
  first.join();
  EXPECT_TRUE(absl::IsCancelled(in_vain)) << in_vain;
}

TEST_F(GroupFaultTest, TheGroupGoesOnThroughAnotherCoordinator) {
  ASSERT_EQ(JoinAll(), 0);
  RunAll(0, 4);
  cluster_->KillCoordinator(1);  // that of rank 1
  const std::vector<absl::Status> statuses = OnAll([&](int rank) { return Run(rank, 4, 5); });
  EXPECT_EQ(statuses[1].code(), absl::StatusCode::kUnavailable) << statuses[1];
  for (const int rank : {0, 2}) {
    EXPECT_FALSE(statuses[rank].ok());
    EXPECT_THAT(std::string(statuses[rank].message()), HasSubstr("rank 1"));
  }
  const int64_t next = JoinAll(0, 1);
  ASSERT_EQ(next, 4);
  RunAll(4, 6);
  EXPECT_EQ(TableDigest(), TablesAfter(6));
}

TEST_F(GroupFaultTest, AShardThatDiesIsNamedAndTheGroupBeginsAgainAfterTheReset) {
  ASSERT_EQ(JoinAll(), 0);
  RunAll(0, 3);
  cluster_->KillShard(1);
  for (const absl::Status& status : OnAll([&](int rank) { return Run(rank, 3, 4); })) {
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr("shard 1"));
  }
  ASSERT_TRUE(cluster_->RestartShard(1).ok());
  // Its rows of three steps are gone: nobody trains on with a mixture.
  ASSERT_TRUE(EventuallyServes());
  const absl::Status lost = client_->Train(model_, {.group = "alone"}).status();
  EXPECT_EQ(lost.code(), absl::StatusCode::kDataLoss) << lost;
  const absl::Status reset = client_->ResetModel(model_.name);
  ASSERT_TRUE(reset.ok()) << reset;
  ASSERT_EQ(JoinAll(), 0);
  RunAll(0, 5);
  EXPECT_EQ(TableDigest(), TablesAfter(5));
}

// Whoever goes away between two steps has not done all its steps.
TEST_F(GroupFaultTest, ABoundedGroupWaitsForARankThatDiedBetweenSteps) {
  std::vector<std::unique_ptr<client::TrainStream>> streams(2);
  for (int rank = 0; rank < 2; ++rank) {
    auto stream = client_->Train(model_, {.group = "bounded",
                                          .rank = rank,
                                          .size = 2,
                                          .consistency = client::Consistency::kBounded,
                                          .step_timeout = kShort});
    ASSERT_TRUE(stream.ok()) << stream.status();
    streams[rank] = *std::move(stream);
  }
  const auto run = [&](int rank, int64_t begin, int64_t end) {
    return RunSteps(*streams[rank], rank, 2, begin, end, /*pipelined=*/false);
  };
  absl::Status other;
  std::thread trainer([&] { other = run(1, 0, 2); });
  const absl::Status first = run(0, 0, 2);
  trainer.join();
  EXPECT_TRUE(first.ok()) << first;
  EXPECT_TRUE(other.ok()) << other;
  streams[1].reset();
  const absl::Status status = run(0, 2, 6);  // step 2 is within the bound, step 3 is not
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
}

class GroupPatienceTest : public GroupFaultTest {
 protected:
  GroupPatienceTest() : GroupFaultTest("timeouts { shard_call_ms: 10000 }") {}
};

// The streams on which the others staged their parts run out of time meanwhile.
TEST_F(GroupPatienceTest, ARankMayBeSlowerThanACallToAShard) {
  ASSERT_EQ(JoinAll(), 0);
  const std::vector<absl::Status> statuses = OnAll([&](int rank) -> absl::Status {
    if (rank != 2) return Run(rank, 0, 1);
    const Share share = MakeShare(0, rank, kRanks);
    absl::Status status = SendLookup(rank, 0);
    auto found = ranks_[rank].stream->ReceiveLookup();
    if (!found.ok()) return found.status();
    absl::SleepFor(absl::Seconds(12));
    const auto gradients = ShareGradients(0, share, found->activations);
    std::vector<client::FeatureGradient> update;
    for (size_t i = 0; i < gradients.size(); ++i) {
      update.push_back({share.features[i], gradients[i], found->activations[i].samples});
    }
    status = ranks_[rank].stream->SendUpdate(0, update);
    return status.ok() ? ranks_[rank].stream->ReceiveUpdate().status() : status;
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(TableDigest(), TablesAfter(1));
}

TEST_F(GroupFaultTest, HundredsOfFailedStepsLeaveNothingBehind) {
  constexpr int kWarmUp = 50;
  constexpr int kFailures = 400;
  std::map<pid_t, Footprint> before;
  const auto fail_once = [&](int i) {
    ASSERT_EQ(JoinAll(i % 2, 1), 0);
    // Rank 2 goes without its update, in every way in turn; the parts of the others are on the
    // shards by then, or are not.
    const std::vector<absl::Status> statuses = OnAll([&](int rank) -> absl::Status {
      if (rank != 2) return Run(rank, 0, 1);
      absl::Status status = SendLookup(rank, 0);
      if (i % 3 > 0) status = ranks_[rank].stream->ReceiveLookup().status();
      if (i % 3 > 1) absl::SleepFor(absl::Milliseconds(2));
      ranks_[rank].stream.reset();
      return absl::AbortedError("");
    });
    for (const absl::Status& status : statuses) {
      ASSERT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    }
  };
  for (int i = 0; i < kWarmUp + kFailures && !HasFatalFailure(); ++i) {
    if (i == kWarmUp) {
      for (const pid_t pid : cluster_->pids()) before[pid] = FootprintOf(pid);
    }
    fail_once(i);
  }
  for (auto& [rank, trainer] : ranks_) trainer.stream.reset();
  for (const auto& [pid, then] : before) {
    const Footprint now = FootprintOf(pid);
    SCOPED_TRACE(absl::StrCat("pid ", pid));
    EXPECT_LT(now.resident_kib, then.resident_kib + kAllowedGrowthKib);
    EXPECT_LE(now.threads, then.threads + 12);
    EXPECT_LE(now.descriptors, then.descriptors + 12);
  }
  // The parts of the last step go with the next generation, and nothing was applied.
  ASSERT_EQ(JoinAll(), 0);
  RunAll(0, 1);
  EXPECT_EQ(TableDigest(), TablesAfter(1));
  // A batch whose caller went away at the worst moment expires.
  const auto batches = [&]() -> int64_t {
    auto status = client_->GetStatus();
    if (!status.ok()) return -1;
    int64_t count = status->batches;
    for (const client::ShardStatus& shard : status->shards) count += shard.batches;
    return count;
  };
  EXPECT_LE(batches(), 8);
  EXPECT_TRUE(Eventually([&] { return batches() == 0; }));
}

}  // namespace group_fault_test
}  // namespace emberd::testing
