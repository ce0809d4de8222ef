// The groups that a shard hosts, reached as a coordinator reaches them: in its own process and over
// gRPC.
// Covers: local_shard.cc, remote_shard.cc, shard_server.cc
#include <future>
#include <optional>

#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "config/config.h"
#include "server/group/collective_router.h"
#include "server/group/testing_group.h"
#include "server/host/shard_backend.h"
#include "server/host/shard_server.h"

namespace emberd::host {
namespace shard_collective_test {

using group::testing::AdvanceOf;
using group::testing::GatherOf;
using group::testing::JoinOf;

class ShardCollectiveTest : public ::testing::TestWithParam<bool> {
 protected:
  ShardCollectiveTest() {
    const v1::ClusterConfig cluster = *config::ParseCluster(
        "shards { address: '127.0.0.1:0' } "
        "coordinators { address: '127.0.0.1:0' }");
    if (GetParam()) {
      server_ = *ShardServer::Start(
          {.cluster = cluster, .shard_index = 0, .metrics = &metrics_, .threads = &threads_});
      shard_ = MakeRemoteShard({.index = 0,
                                .address = server_->address(),
                                .limits = rpc::MessageLimits{1 << 20, rpc::MemoryBudget()},
                                .place = rpc::PlaceOf(cluster, 0)});
    } else {
      shard_ = *MakeLocalShard(cluster, 0, &metrics_, &threads_);
    }
    router_.emplace(std::vector<group::Collective*>{shard_->collective()});
    options_.set_size(2);
    options_.set_consistency(v1::SYNC);
    options_.set_step_timeout_ms(60'000);
  }

  auto Join(int rank) {
    return std::async(std::launch::async, [=, this] {
      return router_->Join(group::testing::JoinOf(id_, rank, options_, std::to_string(rank)),
                           &context_);
    });
  }

  const group::GroupId id_{7, "g"};
  v1::GroupOptions options_;
  rpc::CallContext context_{absl::Now() + absl::Minutes(1)};
  ops::Metrics metrics_{"shard"};
  ThreadPools threads_{2};
  std::unique_ptr<ShardServer> server_;
  std::shared_ptr<ShardBackend> shard_;
  std::optional<group::CollectiveRouter> router_;
};

INSTANTIATE_TEST_SUITE_P(Places, ShardCollectiveTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Remote" : "Local"; });

TEST_P(ShardCollectiveTest, HostsGroups) {
  auto first = Join(0);
  auto second = Join(1);
  const absl::StatusOr<internal::v1::JoinResponse> membership = first.get();
  ASSERT_TRUE(membership.ok()) << membership.status();
  EXPECT_EQ(second.get()->generation(), membership->generation());
  auto gathered = std::async(std::launch::async, [&] {
    return router_->AllGather(group::testing::GatherOf(id_, membership->generation(), 0, 0, 0, "a"),
                              &context_);
  });
  EXPECT_TRUE(router_
                  ->AllGather(group::testing::GatherOf(id_, membership->generation(), 1, 0, 0, "b"),
                              &context_)
                  .ok());
  EXPECT_TRUE(gathered.get().ok());
}

// A member that waits for others would hold up the end of the process.
TEST_P(ShardCollectiveTest, DrainingAnswersWhoWaits) {
  if (server_ == nullptr) GTEST_SKIP() << "a local shard is not drained";
  auto first = Join(0);
  auto second = Join(1);
  const uint64_t generation = first.get()->generation();
  EXPECT_TRUE(second.get().ok());
  std::promise<absl::Status> ended;
  shard_->collective()->Watch(
      group::testing::RequestOf<internal::v1::WatchRequest>(id_, generation, 0),
      /*context=*/nullptr, [&](const absl::Status& status) { ended.set_value(status); });
  // Refused after the watch has come: both are on one connection.
  EXPECT_FALSE(
      router_->Advance(group::testing::AdvanceOf(id_, generation, 0, 1, 0), &context_).ok());
  server_->Drain(absl::Minutes(10));
  EXPECT_EQ(ended.get_future().get().code(), absl::StatusCode::kUnavailable);
}

}  // namespace shard_collective_test
}  // namespace emberd::host
