// Random schedules: members join, bring values, repeat and withdraw calls, leave, come back and are
// late, in any order. Whatever happens, all members of a generation must see the same outcome of an
// exchange, every call must be answered, and nothing may stay behind.
// Covers: server/group/rendezvous.cc, server/group/sync_group.cc
#include <map>
#include <random>
#include <set>
#include <thread>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/testing/sanitized.h"
#include "base/testing/seed.h"
#include "base/thread_pools.h"
#include "server/group/testing_group.h"
#include "server/host/collective_router.h"
#include "server/host/testing_meeting.h"

namespace emberd::host {
namespace random_schedule_test {

using group::GroupId;
using group::Rendezvous;
using group::testing::AskedGather;
using group::testing::AskedJoin;
using group::testing::GatherOf;
using group::testing::JoinOf;
using group::testing::LeaveOf;
using group::testing::MakeOptions;
using group::testing::TestingHost;
namespace pb = internal::v1;

const GroupId kGroup{7, "g"};

std::string ValueOf(uint64_t generation, int rank, int key, int64_t step) {
  return absl::StrCat(generation, "/", rank, "/", key, "/", step);
}

// What members were told of the exchanges of all generations. Thread-safe.
class Outcomes {
 public:
  explicit Outcomes(int size) : size_(size) {}

  void Add(uint64_t generation, int key, int64_t step,
           const absl::StatusOr<pb::AllGatherResponse>& result) {
    absl::MutexLock lock(&mutex_);
    const auto exchange = std::make_tuple(generation, key, step);
    if (result.ok()) {
      ++gathered_;
      ASSERT_EQ(static_cast<int>(result->values().size()), size_);
      for (int rank = 0; rank < size_; ++rank)
        ASSERT_EQ(result->values()[rank], ValueOf(generation, rank, key, step));
      const auto [first, fresh] = complete_.emplace(exchange, result->SerializeAsString());
      EXPECT_EQ(first->second, result->SerializeAsString()) << "members got different answers";
      EXPECT_FALSE(failed_.contains(exchange)) << "complete for some, failed for others";
    } else if (result.status().code() == absl::StatusCode::kAborted ||
               result.status().code() == absl::StatusCode::kDeadlineExceeded) {
      failed_.insert(exchange);
      EXPECT_FALSE(complete_.contains(exchange)) << result.status();
      // One reason for all. Members who come when the next generation has begun only hear that
      // theirs is over.
      if (result.status().message() ==
          absl::StrCat("group 'g': generation ", generation, " is over; join again")) {
        return;
      }
      const auto [first, fresh] = ends_.emplace(generation, result.status());
      EXPECT_EQ(first->second, result.status()) << "members got different reasons";
    } else if (result.status().code() != absl::StatusCode::kResourceExhausted) {  // many repeats
      EXPECT_EQ(result.status().code(), absl::StatusCode::kCancelled) << result.status();
    }
  }
  int64_t gathered() const {
    absl::MutexLock lock(&mutex_);
    return gathered_;
  }

 private:
  const int size_;
  mutable absl::Mutex mutex_;
  std::map<std::tuple<uint64_t, int, int64_t>, std::string> complete_;
  std::set<std::tuple<uint64_t, int, int64_t>> failed_;
  std::map<uint64_t, absl::Status> ends_;
  int64_t gathered_ = 0;
};

// Members on a clock that only the schedule moves.
class Schedule {
 public:
  Schedule(uint32_t seed, int size)
      : random_(seed), options_(MakeOptions(size)), members_(size), outcomes_(size) {}

  void Run(int actions) {
    for (int i = 0; i < actions && !::testing::Test::HasFailure(); ++i) {
      Act(static_cast<int>(random_() % members_.size()));
      Collect();
    }
    Finish();
  }
  int64_t gathered() const { return outcomes_.gathered(); }

 private:
  struct Member {
    AskedJoin join;
    bool joining = false;
    uint64_t generation = 0;  // 0: none
    int64_t step = 0;
    int key = 0;
    bool waits = false;  // for the exchange of its step
  };
  struct Call {
    uint64_t generation;
    int rank, key;
    int64_t step;
    AskedGather gather;
  };

  void Act(int rank) {
    Member& member = members_[rank];
    const uint32_t dice = random_() % 100;
    if (dice < 2) {
      host_.Pass(absl::Milliseconds(random_() % 700));
    } else if (dice < 5) {  // it joins, again or while it does already
      member.join = host_.Join(kGroup, rank, options_);
      member.joining = true;
      joins_.push_back(member.join);
    } else if (dice < 7 && member.joining) {
      member.join.withdraw(absl::CancelledError("gone"));
    } else if (dice < 8 && member.generation != 0) {
      EXPECT_TRUE(host_.Leave(kGroup, member.generation, rank, "gone", dice % 2 == 0).ok());
      member.generation = 0;
    } else if (dice < 12 && !calls_.empty()) {  // a repeated call, maybe of an old generation
      const Call& old = calls_[calls_.size() - 1 - random_() % std::min<size_t>(calls_.size(), 9)];
      Gather(old.generation, old.rank, old.key, old.step);
    } else if (dice < 14 && !calls_.empty()) {
      calls_[random_() % calls_.size()].gather.withdraw(absl::CancelledError("gone"));
    } else if (member.generation != 0) {
      if (!member.waits) Gather(member.generation, rank, member.key, member.step);
      member.waits = true;
    } else if (!member.joining) {
      member.join = host_.Join(kGroup, rank, options_);
      member.joining = true;
      joins_.push_back(member.join);
    }
  }

  void Gather(uint64_t generation, int rank, int key, int64_t step) {
    calls_.push_back({generation, rank, key, step,
                      host_.AllGather(kGroup, generation, rank, key, step,
                                      ValueOf(generation, rank, key, step))});
  }

  // Takes note of answers; members go on.
  void Collect() {
    for (Member& member : members_) {
      if (!member.joining || member.join.waits()) continue;
      member.joining = false;
      if (!member.join.ok()) continue;
      member.generation = member.join->generation();
      member.waits = false;
      member.key = 0;
    }
    std::erase_if(calls_, [this](const Call& call) {
      if (call.gather.waits()) return false;
      EXPECT_EQ(call.gather.state->answers, 1);
      outcomes_.Add(call.generation, call.key, call.step, *call.gather.state->result);
      Proceed(call);
      return true;
    });
  }
  void Proceed(const Call& call) {
    Member& member = members_[call.rank];
    if (member.generation != call.generation || member.step != call.step || member.key != call.key)
      return;
    member.waits = false;
    if (call.gather.ok()) {
      member.key = (member.key + 1) % 3;
      if (member.key == 0) ++member.step;
    } else if (call.gather.status().code() != absl::StatusCode::kCancelled) {
      member.generation = 0;
    }
  }

  void Finish() {
    host_.Pass(absl::Milliseconds(500));
    host_.Pass(absl::Milliseconds(500));
    Collect();
    EXPECT_TRUE(calls_.empty()) << calls_.size() << " calls hang";
    for (const AskedJoin& join : joins_) EXPECT_EQ(join.state->answers, 1);
    for (size_t rank = 0; rank < members_.size(); ++rank) {
      EXPECT_TRUE(
          host_.Leave(kGroup, members_[rank].generation, static_cast<int>(rank), "", true).ok());
    }
    // A generation that no member knows of (all its joins were repeated meanwhile) cannot be left.
    const Rendezvous::Load load = host_->load();
    EXPECT_EQ(load.joining + load.waiting + load.open_exchanges, 0u);
    host_.Pass(absl::Seconds(5));
    EXPECT_EQ(host_->load().groups, 0u);
  }

  std::mt19937 random_;
  const v1::GroupOptions options_;
  TestingHost host_;
  std::vector<Member> members_;
  std::vector<Call> calls_;  // that had no answer when last looked at
  std::vector<AskedJoin> joins_;
  Outcomes outcomes_;
};

TEST(RandomScheduleTest, MembersAgreeOnEveryOutcome) {
  const auto seed = static_cast<uint32_t>(TestSeed());
  constexpr int kSchedules = Rounds(400);
  int64_t gathered = 0;
  for (uint32_t i = 0; i < kSchedules && !HasFailure(); ++i) {
    SCOPED_TRACE(absl::StrCat("schedule ", i));
    Schedule schedule(seed + i, 1 + static_cast<int>(i % 8));
    schedule.Run(1000);
    gathered += schedule.gathered();
  }
  EXPECT_GT(gathered, 25 * kSchedules) << "the schedules hardly ever complete an exchange";
}

// The same with threads, the real clock and calls that block: members drop out at random moments,
// the others hear of it and join again.
TEST(RandomScheduleTest, ThreadsAgreeOnEveryOutcome) {
  constexpr int kSize = 4;
  const auto seed = static_cast<uint32_t>(TestSeed());
  Rendezvous rendezvous;
  BlockingPool threads_of_router;
  auto watching =
      std::make_unique<CollectiveRouter>(MeetingShards({&rendezvous}), &threads_of_router);
  CollectiveRouter& router = *watching;
  const v1::GroupOptions options = MakeOptions(kSize, v1::SYNC, 50);
  Outcomes outcomes(kSize);
  const auto member = [&](int rank) {
    std::mt19937 random(seed + rank);
    uint64_t generation = 0;
    int64_t step = 0;
    for (int i = 0; i < 2000; ++i) {
      // Some callers are in a hurry, so that deadlines, cancellation and answers meet.
      rpc::CallContext context(absl::Now() +
                               absl::Milliseconds(random() % 50 == 0 ? random() % 5 : 10'000));
      if (generation == 0) {
        // Coordinators of their own, so that all meet at the host.
        const auto joined =
            router.Join(JoinOf(kGroup, rank, options, absl::StrCat(rank)), &context);
        if (joined.ok()) generation = joined->generation();
        continue;
      }
      if (random() % 100 == 0) {
        router.Leave(LeaveOf(kGroup, generation, rank, "gone", false));
        generation = 0;
        continue;
      }
      const auto gathered = router.AllGather(
          GatherOf(kGroup, generation, rank, step, 0, ValueOf(generation, rank, 0, step)),
          &context);
      const bool hurried = absl::StrContains(gathered.status().message(), "caller's deadline");
      if (!hurried) outcomes.Add(generation, 0, step, gathered);
      if (gathered.ok()) ++step;
      if (!gathered.ok() && !hurried) generation = 0;
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank) threads.emplace_back(member, rank);
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(outcomes.gathered(), 0);
  watching.reset();
  EXPECT_EQ(rendezvous.load().waiting + rendezvous.load().joining, 0u);
}

}  // namespace random_schedule_test
}  // namespace emberd::host
