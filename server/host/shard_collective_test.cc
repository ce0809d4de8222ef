// The groups that a shard hosts, reached as a coordinator reaches them: in its own process and over
// gRPC. Exchanges, deadlines, cancellation, watches.
// Covers: shard_backend.cc, shard_server.cc, verbs.cc
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "base/thread_pools.h"
#include "config/config.h"
#include "server/group/testing_group.h"
#include "server/host/collective_router.h"
#include "server/host/shard_backend.h"
#include "server/host/shard_server.h"
#include "server/host/testing_meeting.h"

namespace emberd::host {
namespace shard_collective_test {

using ::testing::ElementsAre;
using ::testing::StartsWith;

using group::testing::AdvanceOf;
using group::testing::GatherOf;
using group::testing::JoinOf;
using group::testing::LeaveOf;
using group::testing::MakeOptions;
using group::testing::RequestOf;
namespace pb = internal::v1;

const group::GroupId kGroup{7, "g"};
constexpr int64_t kLong = 60'000;  // ms: longer than any test

class ShardCollectiveTest : public ::testing::TestWithParam<bool> {
 protected:
  ShardCollectiveTest() {
    if (!GetParam()) {
      here_ = std::make_unique<group::Rendezvous>();
      shard_ = std::make_shared<MeetingShard>(here_.get());
    } else {
      const v1::ClusterConfig cluster = *config::ParseCluster(
          "shards { address: '127.0.0.1:0' } coordinators { address: '127.0.0.1:0' }");
      server_ = *ShardServer::Start(
          {.cluster = cluster, .shard_index = 0, .metrics = &metrics_, .threads = &threads_});
      shard_ = MakeRemoteShard({.index = 0,
                                .address = server_->address(),
                                .limits = rpc::MessageLimits{1 << 20, rpc::MemoryBudget()},
                                .place = rpc::PlaceOf(cluster, 0)});
    }
    router_ = std::make_unique<CollectiveRouter>(std::vector<std::shared_ptr<ShardBackend>>{shard_},
                                                 &threads_.blocking);
  }

  group::Rendezvous::Load load() const {
    return server_ != nullptr ? server_->groups() : here_->load();
  }
  // What it says to those who wait.
  std::string Stop() {
    const std::string why = "the shard that hosts the group is going away";
    if (here_ != nullptr) here_->Close(absl::UnavailableError(why));
    if (server_ != nullptr) server_->Drain(absl::ZeroDuration());
    return "group 'g': " + why;
  }

  // Ranks of more than one coordinator meet at the host.
  static std::string CoordinatorOf(int rank) { return std::to_string(rank); }
  // A call on a thread of its own.
  auto Join(int rank, const v1::GroupOptions& options) {
    return std::async(std::launch::async, [=, this] {
      return router_->Join(JoinOf(kGroup, rank, options, CoordinatorOf(rank)), &context_);
    });
  }
  auto Gather(int rank, int64_t step, const std::string& value) {
    return std::async(std::launch::async, [=, this] {
      return router_->AllGather(GatherOf(kGroup, generation_, rank, step, 0, value), &context_);
    });
  }
  // Beside that of the router.
  auto Watch(int rank, rpc::CallContext* context) {
    return std::async(std::launch::async, [=, this] {
      return shard_->Watch(RequestOf<pb::WatchRequest>(kGroup, generation_, rank), context)
          .status();
    });
  }
  void JoinAll(const v1::GroupOptions& options) {
    std::vector<std::future<absl::StatusOr<pb::JoinResponse>>> joins;
    for (int rank = 0; rank < options.size(); ++rank) joins.push_back(Join(rank, options));
    for (auto& join : joins) {
      const absl::StatusOr<pb::JoinResponse> membership = join.get();
      ASSERT_TRUE(membership.ok()) << membership.status();
      EXPECT_EQ(static_cast<int>(membership->coordinators().size()), options.size());
      generation_ = membership->generation();
    }
  }
  // Until a call has arrived that waits.
  void AwaitLoad(size_t joining, size_t waiting) {
    while (true) {
      const group::Rendezvous::Load now = load();
      if (now.joining == joining && now.waiting == waiting) return;
      absl::SleepFor(absl::Milliseconds(1));
    }
  }

  ops::Metrics metrics_{"shard"};
  ThreadPools threads_{2};
  std::unique_ptr<group::Rendezvous> here_;
  std::unique_ptr<ShardServer> server_;
  std::shared_ptr<ShardBackend> shard_;
  std::unique_ptr<CollectiveRouter> router_;
  rpc::CallContext context_{absl::Now() + absl::Minutes(1)};
  uint64_t generation_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Places, ShardCollectiveTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Remote" : "Local"; });

TEST_P(ShardCollectiveTest, MembersExchangeValues) {
  JoinAll(MakeOptions(2, v1::SYNC, kLong));
  for (int64_t step = 0; step < 20; ++step) {
    const std::string binary("\0\xff", 2);
    auto first = Gather(0, step, "a");
    auto second = Gather(1, step, binary);
    const absl::StatusOr<pb::AllGatherResponse> gathered = first.get();
    ASSERT_TRUE(gathered.ok()) << gathered.status();
    EXPECT_THAT(gathered->values(), ElementsAre("a", binary));
    ASSERT_EQ(gathered->arrival_us_size(), 2);
    EXPECT_EQ(std::min(gathered->arrival_us()[0], gathered->arrival_us()[1]), 0);
    EXPECT_EQ(second.get()->SerializeAsString(), gathered->SerializeAsString());
  }
}

TEST_P(ShardCollectiveTest, ErrorsAreTheGroupsOwn) {
  JoinAll(MakeOptions(2, v1::SYNC, 5000));
  auto waiting = Gather(1, 4, "b");
  const absl::Status expected = absl::DeadlineExceededError(
      "group 'g': rank 0 did not come to exchange 0 of step 4 within 5000 ms; join again");
  EXPECT_EQ(waiting.get().status(), expected);
  EXPECT_EQ(Gather(0, 4, "a").get().status(), expected);
  EXPECT_EQ(router_->Join(JoinOf(kGroup, 2, MakeOptions(2), "c"), &context_).status(),
            absl::InvalidArgumentError("group 'g': rank is 2; it must be in 0 .. 1"));
}

TEST_P(ShardCollectiveTest, ACancelledJoinHasNotHappened) {
  auto gone = Join(0, MakeOptions(2, v1::SYNC, kLong));
  AwaitLoad(1, 0);
  context_.Cancel();
  EXPECT_EQ(gone.get().status().code(), absl::StatusCode::kCancelled);
  AwaitLoad(0, 0);
}

TEST_P(ShardCollectiveTest, ACancelledGatherLeavesItsValue) {
  JoinAll(MakeOptions(2, v1::SYNC, kLong));
  auto gone = Gather(0, 1, "a");
  AwaitLoad(0, 2);
  context_.Cancel();
  EXPECT_EQ(gone.get().status().code(), absl::StatusCode::kCancelled);
  AwaitLoad(0, 1);
  rpc::CallContext other(absl::Now() + absl::Minutes(1));
  const absl::StatusOr<pb::AllGatherResponse> gathered =
      router_->AllGather(GatherOf(kGroup, generation_, 1, 1, 0, "b"), &other);
  ASSERT_TRUE(gathered.ok()) << gathered.status();
  EXPECT_THAT(gathered->values(), ElementsAre("a", "b"));
}

TEST_P(ShardCollectiveTest, CallersHaveDeadlinesOfTheirOwn) {
  rpc::CallContext hurried(absl::Now() + absl::Milliseconds(20));
  const absl::Status status =
      router_->Join(JoinOf(kGroup, 0, MakeOptions(2, v1::SYNC, kLong), "c"), &hurried).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  AwaitLoad(0, 0);
}

TEST_P(ShardCollectiveTest, BoundedMembersWaitForEachOther) {
  const v1::GroupOptions options = MakeOptions(2, v1::BOUNDED, kLong);
  const absl::StatusOr<pb::JoinResponse> first =
      router_->Join(JoinOf(kGroup, 0, options, "c"), &context_);
  const absl::StatusOr<pb::JoinResponse> second =
      router_->Join(JoinOf(kGroup, 1, options, "c"), &context_);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE(first->generation(), second->generation());
  auto ahead = std::async(std::launch::async, [&] {
    return router_->Advance(AdvanceOf(kGroup, first->generation(), 0, 5, 5), &context_);
  });
  AwaitLoad(0, 3);  // with the watches of both
  EXPECT_EQ(router_->Advance(AdvanceOf(kGroup, second->generation(), 1, 3, 3), &context_),
            absl::OkStatus());
  AwaitLoad(0, 3);
  router_->Leave(LeaveOf(kGroup, second->generation(), 1, "", /*finished=*/true));
  EXPECT_EQ(ahead.get(), absl::OkStatus());
}

TEST_P(ShardCollectiveTest, WatchesTellOfTheEnd) {
  JoinAll(MakeOptions(2, v1::SYNC, kLong));
  auto ended = Watch(1, &context_);
  AwaitLoad(0, 2);
  router_->Leave(LeaveOf(kGroup, generation_, 0, "why not", false));
  EXPECT_EQ(ended.get(), absl::AbortedError("group 'g': rank 0 left (why not); join again"));
  AwaitLoad(0, 0);
}

TEST_P(ShardCollectiveTest, AWatchThatGoesAwayEndsTheGeneration) {
  JoinAll(MakeOptions(2, v1::SYNC, kLong));
  rpc::CallContext watching(absl::InfiniteFuture());
  auto ended = Watch(1, &watching);
  AwaitLoad(0, 2);
  auto waiting = Gather(0, 1, "a");
  AwaitLoad(0, 3);
  watching.Cancel();
  EXPECT_EQ(ended.get().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(
      waiting.get().status(),
      absl::AbortedError("group 'g': rank 1 left in step 1 (its coordinator is gone); join again"));
  AwaitLoad(0, 0);
}

// The host takes the end of a router for the end of its members.
TEST_P(ShardCollectiveTest, ARouterThatEndsIsWatchedNoMore) {
  JoinAll(MakeOptions(2, v1::SYNC, kLong));
  AwaitLoad(0, 1);
  router_ = nullptr;
  AwaitLoad(0, 0);
}

// A member that waits for others would hold up the end of the process.
TEST_P(ShardCollectiveTest, AHostThatStopsAnswersAll) {
  JoinAll(MakeOptions(2, v1::SYNC, kLong));
  auto ended = Watch(1, &context_);
  auto waiting = Gather(0, 1, "a");
  AwaitLoad(0, 3);
  const absl::Status stopped = absl::UnavailableError(Stop());
  EXPECT_EQ(waiting.get().status(), stopped);
  EXPECT_EQ(ended.get(), stopped);
  const absl::Status late = Gather(1, 1, "b").get().status();
  EXPECT_EQ(late.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(late.message()), StartsWith(GetParam() ? "shard 0 at " : "group 'g'"));
  router_->Leave(LeaveOf(kGroup, generation_, 0, "gone", false));  // returns all the same
}

// As a coordinator has them that holds its shards itself.
TEST(LocalShardTest, HostsGroups) {
  const v1::ClusterConfig cluster = *config::ParseCluster(
      "shards { address: '127.0.0.1:0' } coordinators { address: '127.0.0.1:0' }");
  ops::Metrics metrics("shard");
  ThreadPools threads(2);
  CollectiveRouter router({*MakeLocalShard(cluster, 0, &metrics, &threads)}, &threads.blocking);
  rpc::CallContext context(absl::Now() + absl::Minutes(1));
  const auto joined = router.Join(JoinOf(kGroup, 0, MakeOptions(1), "c"), &context);
  ASSERT_TRUE(joined.ok()) << joined.status();
  const auto gathered =
      router.AllGather(GatherOf(kGroup, joined->generation(), 0, 0, 0, "a"), &context);
  ASSERT_TRUE(gathered.ok()) << gathered.status();
  EXPECT_THAT(gathered->values(), ElementsAre("a"));
  EXPECT_EQ(router.Join(JoinOf(kGroup, 1, MakeOptions(1), "c"), &context).status(),
            absl::InvalidArgumentError("group 'g': rank is 1; it must be in 0 .. 0"));
}

}  // namespace shard_collective_test
}  // namespace emberd::host
