// A coordinator's way to its groups: the right host, and the exchange inside one coordinator, which
// must behave as the one over the host does.
#include "server/host/collective_router.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <memory>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/steady_time.h"
#include "base/thread_pools.h"
#include "server/group/testing_group.h"
#include "server/host/testing_meeting.h"

namespace emberd::host {
namespace collective_router_test {

using ::testing::ElementsAre;

using group::GroupId;
using group::HostOf;
using group::Rendezvous;
using group::testing::AdvanceOf;
using group::testing::GatherOf;
using group::testing::JoinOf;
using group::testing::LeaveOf;
using group::testing::MakeOptions;
namespace pb = internal::v1;

TEST(HostOfTest, IsTheSameInEveryProcessAndRelease) {
  EXPECT_EQ(HostOf({0, ""}, 1), 0);
  EXPECT_EQ(HostOf({5912239543096508061u, "training"}, 1024), 758);
  EXPECT_EQ(HostOf({1, "a"}, 1024), 502);
}

TEST(HostOfTest, SpreadsGroups) {
  std::vector<int> groups(8);
  for (int i = 0; i < 800; ++i) ++groups[HostOf({7, absl::StrCat("group ", i)}, 8)];
  for (const int count : groups) EXPECT_GT(count, 50);
  std::set<int> hosts;
  for (uint64_t model = 0; model < 64; ++model) hosts.insert(HostOf({model, "g"}, 8));
  EXPECT_EQ(hosts.size(), 8u);
}

class CollectiveRouterTest : public ::testing::Test {
 protected:
  CollectiveRouterTest() : here_(Hosts(), &threads_), there_(Hosts(), &threads_) {}

  std::vector<std::shared_ptr<ShardBackend>> Hosts() {
    return MeetingShards({&rendezvous_[0], &rendezvous_[1]});
  }
  Rendezvous& host() { return rendezvous_[HostOf(group_, 2)]; }

  // Rank r joins through routers[r]; the generation.
  uint64_t JoinAll(const std::vector<CollectiveRouter*>& routers, const v1::GroupOptions& options) {
    std::vector<std::future<absl::StatusOr<pb::JoinResponse>>> joins;
    for (int rank = 0; rank < options.size(); ++rank) {
      joins.push_back(std::async(std::launch::async, [=, this] {
        CollectiveRouter* router = routers[rank];
        return router->Join(JoinOf(group_, rank, options, router == &here_ ? "here" : "there"),
                            &context_);
      }));
    }
    uint64_t generation = 0;
    for (auto& join : joins) {
      const absl::StatusOr<pb::JoinResponse> membership = join.get();
      EXPECT_TRUE(membership.ok()) << membership.status();
      if (membership.ok()) generation = membership->generation();
    }
    return generation;
  }
  auto Gather(CollectiveRouter* router, uint64_t generation, int rank, int64_t step,
              const std::string& value) {
    return std::async(std::launch::async, [=, this] {
      return router->AllGather(GatherOf(group_, generation, rank, step, 0, value), &context_);
    });
  }
  static void AwaitWaiting(const std::function<Rendezvous::Load()>& load, size_t exchanges) {
    while (load().open_exchanges != exchanges) absl::SleepFor(absl::Milliseconds(1));
  }
  // Watches begin and end on threads of their own.
  static void AwaitWatches(const std::function<Rendezvous::Load()>& load, size_t watches) {
    while (load().waiting != watches) absl::SleepFor(absl::Milliseconds(1));
  }

  const GroupId group_{7, "g"};
  Rendezvous rendezvous_[2];
  BlockingPool threads_;
  rpc::CallContext context_{absl::Now() + absl::Minutes(1)};
  CollectiveRouter here_, there_;
};

TEST_F(CollectiveRouterTest, ManyCoordinatorsMeetAtTheHost) {
  const uint64_t generation = JoinAll({&here_, &there_}, MakeOptions(2, v1::SYNC, 60'000));
  auto first = Gather(&here_, generation, 0, 1, "a");
  AwaitWaiting([&] { return host().load(); }, 1);
  auto second = Gather(&there_, generation, 1, 1, "b");
  EXPECT_THAT(first.get()->values(), ElementsAre("a", "b"));
  EXPECT_THAT(second.get()->values(), ElementsAre("a", "b"));
  EXPECT_EQ(here_.local_load().groups, 0u);
  EXPECT_EQ(rendezvous_[1 - HostOf(group_, 2)].load().groups, 0u);
}

TEST_F(CollectiveRouterTest, OneCoordinatorExchangesValuesByItself) {
  const uint64_t generation = JoinAll({&here_, &here_}, MakeOptions(2, v1::SYNC, 60'000));
  auto first = Gather(&here_, generation, 0, 1, "a");
  AwaitWaiting([&] { return here_.local_load(); }, 1);
  EXPECT_EQ(host().load().open_exchanges, 0u);
  auto second = Gather(&here_, generation, 1, 1, "b");
  EXPECT_THAT(first.get()->values(), ElementsAre("a", "b"));
  EXPECT_THAT(second.get()->values(), ElementsAre("a", "b"));
  EXPECT_EQ(host().load().kept_exchanges, 0u);
}

TEST_F(CollectiveRouterTest, AMissingRankFailsTheStepForAllHereToo) {
  const uint64_t generation = JoinAll({&here_, &here_}, MakeOptions(2, v1::SYNC, 5000));
  const absl::Status expected = absl::DeadlineExceededError(
      "group 'g': rank 1 did not come to exchange 0 of step 4 within 5000 ms; join again");
  EXPECT_EQ(Gather(&here_, generation, 0, 4, "a").get().status(), expected);
  EXPECT_EQ(Gather(&here_, generation, 1, 4, "b").get().status(), expected);
  const uint64_t next = JoinAll({&here_, &here_}, MakeOptions(2, v1::SYNC, 5000));
  EXPECT_GT(next, generation);
}

TEST_F(CollectiveRouterTest, LeavingEndsTheGenerationHereAndAtTheHost) {
  const uint64_t generation = JoinAll({&here_, &here_}, MakeOptions(2, v1::SYNC, 60'000));
  auto waiting = Gather(&here_, generation, 0, 4, "a");
  AwaitWaiting([&] { return here_.local_load(); }, 1);
  here_.Leave(LeaveOf(group_, generation, 1, "its stream ended", false));
  EXPECT_EQ(waiting.get().status(),
            absl::AbortedError("group 'g': rank 1 left in step 4 (its stream ended); join again"));
  EXPECT_EQ(there_.AllGather(GatherOf(group_, generation, 0, 4, 0, "a"), &context_).status(),
            absl::AbortedError("group 'g': rank 1 left (its stream ended); join again"));
}

// A trainer whose stream seems alive to its old coordinator comes back through another one.
TEST_F(CollectiveRouterTest, JoiningAgainElsewhereEndsTheGenerationHere) {
  const v1::GroupOptions options = MakeOptions(2, v1::SYNC, 60'000);
  const uint64_t generation = JoinAll({&here_, &here_}, options);
  auto waiting = Gather(&here_, generation, 0, 4, "a");
  AwaitWaiting([&] { return here_.local_load(); }, 1);
  auto again = std::async(std::launch::async, [&] {
    return there_.Join(JoinOf(group_, 1, options, "there"), &context_);
  });
  EXPECT_EQ(waiting.get().status(),
            absl::AbortedError("group 'g': rank 1 joined again; join again"));
  EXPECT_TRUE(here_.Join(JoinOf(group_, 0, options, "here"), &context_).ok());
  const absl::StatusOr<pb::JoinResponse> membership = again.get();
  ASSERT_TRUE(membership.ok());
  EXPECT_THAT(membership->coordinators(), ElementsAre("here", "there"));
  auto first = Gather(&here_, membership->generation(), 0, 4, "a");
  auto second = Gather(&there_, membership->generation(), 1, 4, "b");
  EXPECT_THAT(first.get()->values(), ElementsAre("a", "b"));
  EXPECT_THAT(second.get()->values(), ElementsAre("a", "b"));
}

TEST_F(CollectiveRouterTest, AHostThatStopsEndsTheGenerationHere) {
  const uint64_t generation = JoinAll({&here_, &here_}, MakeOptions(2, v1::SYNC, 60'000));
  auto waiting = Gather(&here_, generation, 0, 4, "a");
  AwaitWaiting([&] { return here_.local_load(); }, 1);
  host().Close(absl::UnavailableError("stopped"));
  EXPECT_EQ(waiting.get().status(), absl::UnavailableError("group 'g': stopped"));
}

// Cannot be reached for a while. Counts who has finished.
class DeafShard final : public MeetingShard {
 public:
  using MeetingShard::MeetingShard;

  std::atomic<bool> deaf = false;
  std::atomic<int> told = 0;
  std::atomic<int> unheard = 0;
  absl::Time latest = absl::InfinitePast();  // deadline of what was not heard

 private:
  absl::Status Control(ShardVerb verb, const google::protobuf::Message& request,
                       google::protobuf::Message* response, rpc::CallContext* context) override {
    if (deaf) {
      ++unheard;
      latest = std::max(latest, context->deadline());
      return absl::UnavailableError("deaf");
    }
    if (verb != ShardVerb::kOpenGroup) {
      return MeetingShard::Control(verb, request, response, context);
    }
    told += static_cast<const pb::OpenGroupRequest&>(request).finished() ? 1 : 0;
    return absl::OkStatus();
  }
};

// Would catch: ranks that wait for ever for one that has finished, a group that is never free, and
// shards that hear, and log, the same every second because another one is away.
TEST_F(CollectiveRouterTest, WhoDoesNotHearALeaveIsToldAgain) {
  const auto first = std::make_shared<DeafShard>(&rendezvous_[0]);
  const auto second = std::make_shared<DeafShard>(&rendezvous_[1]);
  CollectiveRouter router({first, second}, &threads_);
  const v1::GroupOptions options = MakeOptions(2, v1::BOUNDED, 60'000);
  const auto stays = router.Join(JoinOf(group_, 0, options, "here"), &context_);
  const auto goes = router.Join(JoinOf(group_, 1, options, "here"), &context_);
  ASSERT_TRUE(stays.ok() && goes.ok());
  AwaitWatches([&] { return host().load(); }, 2);
  for (const auto& shard : {first, second}) shard->deaf = true;
  pb::OpenGroupRequest finished;
  finished.set_finished(true);
  router.Leave(LeaveOf(group_, goes->generation(), 1, "", false));
  router.Leave(LeaveOf(group_, goes->generation(), 1, "", true), finished);
  first->deaf = false;
  for (int again = 0; again < 3; ++again) router.Retry();
  EXPECT_EQ(first->told, 1) << "once, though the other one hears nothing";
  EXPECT_EQ(second->told, 0);
  second->deaf = false;
  router.Retry();
  EXPECT_EQ(second->told, 1);
  EXPECT_EQ(router.Advance(AdvanceOf(group_, stays->generation(), 0, 9, 9), &context_),
            absl::OkStatus());
  router.Leave(LeaveOf(group_, stays->generation(), 0, "", false));
  EXPECT_EQ(host().Forget(group_), absl::OkStatus());
  router.Retry();
  EXPECT_EQ(first->told, 1);
  EXPECT_EQ(second->told, 1) << "all have heard";
}

// Would catch: a thread for each rank and shard, kept for ever, where a run ends while shards are
// away; and too short a time for a coordinator that stops, and does not come to say it again.
TEST_F(CollectiveRouterTest, ADeafShardTakesOneThread) {
  const auto first = std::make_shared<DeafShard>(&rendezvous_[0]);
  const auto second = std::make_shared<DeafShard>(&rendezvous_[1]);
  CollectiveRouter router({first, second}, &threads_);
  for (const auto& shard : {first, second}) shard->deaf = true;
  pb::OpenGroupRequest finished;
  finished.set_finished(true);
  constexpr int kLeaving = 50;
  for (int rank = 0; rank < kLeaving; ++rank) {
    const absl::Time before = SteadyNow();
    router.Leave(LeaveOf(group_, 7, rank, "", true), finished);
    for (const auto& shard : {first, second})
      EXPECT_GE(shard->latest, before + absl::Seconds(5)) << "the first time";
  }
  EXPECT_EQ(threads_.threads(), 0) << "all that is said is said by those who leave";
  router.Retry();
  for (const auto& shard : {first, second}) EXPECT_EQ(shard->unheard, 2 * kLeaving);
  EXPECT_EQ(threads_.threads(), 1) << "that of the caller tells the other shard";
}

// Would catch: a rank that needs no others, and goes on as a member of nothing.
TEST_F(CollectiveRouterTest, ARankAloneHearsThatItsHostDoesNotHaveIt) {
  const auto is_over = [&](const pb::JoinRequest& join, uint64_t generation) {
    return here_.WatchOf(join.name(), generation)->cancelled();
  };
  const auto await_gone = [&](const pb::JoinRequest& join, uint64_t generation) {
    while (!is_over(join, generation)) absl::SleepFor(absl::Milliseconds(1));
  };
  for (const v1::Consistency consistency : {v1::SYNC, v1::ASYNC}) {
    const pb::JoinRequest join = JoinOf(group_, 0, MakeOptions(1, consistency), "here");
    const uint64_t first = here_.Join(join, &context_)->generation();
    const auto watch = here_.WatchOf(join.name(), first);
    const uint64_t generation = here_.Join(join, &context_)->generation();
    AwaitWatches([&] { return host().load(); }, 1);
    await_gone(join, first);  // another took its place
    EXPECT_TRUE(watch->cancelled()) << "who holds it sees it, too";
    EXPECT_FALSE(is_over(join, generation));
    here_.Leave(LeaveOf(group_, generation, 0, "", false));
  }
  // A rank whose rows are gone is not of the group that others begin with the new ones.
  const v1::GroupOptions two = MakeOptions(2, v1::ASYNC);
  const pb::JoinRequest old = JoinOf(group_, 0, two, "here", /*history=*/5);
  const uint64_t before = here_.Join(old, &context_)->generation();
  const pb::JoinRequest join = JoinOf(group_, 1, two, "here", /*history=*/6);
  const uint64_t generation = here_.Join(join, &context_)->generation();
  await_gone(old, before);
  AwaitWatches([&] { return host().load(); }, 1);
  EXPECT_FALSE(is_over(join, generation));
  host().Close(absl::UnavailableError("stopped"));
  await_gone(join, generation);
}

TEST_F(CollectiveRouterTest, GenerationsThatAreOverLeaveNothingBehind) {
  for (int i = 0; i < 1000; ++i) {
    const uint64_t generation =
        here_.Join(JoinOf(group_, 0, MakeOptions(1), "here"), &context_)->generation();
    ASSERT_TRUE(here_.AllGather(GatherOf(group_, generation, 0, i, 0, "a"), &context_).ok());
    if (i % 2 == 0) here_.Leave(LeaveOf(group_, generation, 0, "", true));
  }
  EXPECT_EQ(here_.local_load().groups, 1u);
  EXPECT_EQ(here_.local_load().waiting, 0u);
  EXPECT_EQ(here_.local_load().kept_exchanges, 1u);
  EXPECT_EQ(host().load().groups, 1u);
  AwaitWatches([&] { return host().load(); }, 1);  // of the last generation
}

TEST_F(CollectiveRouterTest, BoundedGroupsMeetAtTheHost) {
  const v1::GroupOptions options = MakeOptions(2, v1::BOUNDED, 20);
  const uint64_t first = here_.Join(JoinOf(group_, 0, options, "here"), &context_)->generation();
  const uint64_t second = there_.Join(JoinOf(group_, 1, options, "there"), &context_)->generation();
  EXPECT_EQ(here_.Advance(AdvanceOf(group_, first, 0, 1, 0), &context_), absl::OkStatus());
  EXPECT_EQ(here_.Advance(AdvanceOf(group_, first, 0, 1, 1), &context_).code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(there_.Advance(AdvanceOf(group_, second, 1, 1, 1), &context_), absl::OkStatus());
  EXPECT_EQ(here_.local_load().groups, 0u);
}

}  // namespace collective_router_test
}  // namespace emberd::host
