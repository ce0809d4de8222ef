// What holds for all groups of a host together: what is refused, what is forgotten, and that memory
// stays bounded whatever members do.
// Covers: group.cc, sync_group.cc, progress_group.cc
#include "server/group/rendezvous.h"

#include <limits>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/group/testing_group.h"

namespace emberd::group::testing {
namespace rendezvous_test {

const GroupId kGroup{7, "g"};
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

absl::Status Invalid(const std::string& text) {
  return absl::InvalidArgumentError("group 'g': " + text);
}

TEST(RendezvousTest, RefusesOptionsOutOfRange) {
  TestingHost host;
  const auto join = [&](int rank, auto change) {
    v1::GroupOptions options = MakeOptions(2);
    change(&options);
    return host.Join(kGroup, rank, options).status();
  };
  const auto none = [](v1::GroupOptions*) {};
  EXPECT_EQ(join(-1, none), Invalid("rank is -1; it must be in 0 .. 1"));
  EXPECT_EQ(join(2, none), Invalid("rank is 2; it must be in 0 .. 1"));
  EXPECT_EQ(join(0, [](auto* o) { o->set_size(0); }),
            Invalid("options.size is 0; it must be in 1 .. 1024"));
  EXPECT_EQ(join(0, [](auto* o) { o->set_size(1025); }),
            Invalid("options.size is 1025; it must be in 1 .. 1024"));
  EXPECT_EQ(join(0, [](auto* o) { o->set_consistency(v1::CONSISTENCY_UNSPECIFIED); }),
            Invalid("options.consistency is 0; it must be SYNC, ASYNC or BOUNDED"));
  EXPECT_EQ(join(0, [](auto* o) { o->set_consistency(static_cast<v1::Consistency>(9)); }),
            Invalid("options.consistency is 9; it must be SYNC, ASYNC or BOUNDED"));
  EXPECT_EQ(join(0, [](auto* o) { o->set_staleness_bound(kMaxInt32 + 1); }),
            Invalid("options.staleness_bound is 2147483648; it must be in 0 .. 2147483647"));
  EXPECT_EQ(join(0, [](auto* o) { o->set_first_step(-1); }),
            Invalid("options.first_step is -1; it must be in 0 .. 4611686018427387904"));
  EXPECT_EQ(join(0, [](auto* o) { o->set_step_timeout_ms(0); }),
            Invalid("options.step_timeout_ms is 0; it must be in 1 .. 2147483647"));
  EXPECT_EQ(host.Join({7, ""}, 0, MakeOptions(1)).status(),
            absl::InvalidArgumentError("name.group has 0 bytes; it must have 1 to 128"));
  EXPECT_EQ(host.Join({7, std::string(129, 'g')}, 0, MakeOptions(1)).status(),
            absl::InvalidArgumentError("name.group has 129 bytes; it must have 1 to 128"));
  EXPECT_EQ(host.Join({7, "a b"}, 0, MakeOptions(1)).status(),
            absl::InvalidArgumentError(
                "name.group is 'a b'; it may hold letters, digits and _-.:/ only"));
  EXPECT_TRUE(host.Join({7, std::string(128, 'g')}, 0, MakeOptions(1)).ok());
  EXPECT_EQ(host->load().groups, 1u);
}

TEST(RendezvousTest, RefusesOptionsThatDiffer) {
  TestingHost host;
  const AskedJoin first = host.Join(kGroup, 0, MakeOptions(2));
  const auto join = [&](auto change) {
    v1::GroupOptions options = MakeOptions(2);
    change(&options);
    return host.Join(kGroup, 1, options).status();
  };
  EXPECT_EQ(join([](auto* o) { o->set_size(3); }),
            Invalid("options.size is 3; the other members joined with 2"));
  EXPECT_EQ(join([](auto* o) { o->set_consistency(v1::ASYNC); }),
            Invalid("options.consistency is ASYNC; the other members joined with SYNC"));
  EXPECT_EQ(join([](auto* o) { o->set_staleness_bound(4); }),
            Invalid("options.staleness_bound is 4; the other members joined with 0"));
  EXPECT_EQ(join([](auto* o) { o->set_pipelined(true); }),
            Invalid("options.pipelined is 1; the other members joined with 0"));
  EXPECT_EQ(join([](auto* o) { o->set_first_step(5); }),
            Invalid("options.first_step is 5; the other members joined with 0"));
  EXPECT_EQ(join([](auto* o) { o->set_step_timeout_ms(600); }),
            Invalid("options.step_timeout_ms is 600; the other members joined with 500"));
  EXPECT_TRUE(first.waits());
  EXPECT_EQ(join([](auto*) {}), absl::OkStatus());
  EXPECT_EQ(join([](auto* o) { o->set_size(3); }).code(), absl::StatusCode::kInvalidArgument)
      << "the generation lives";
  EXPECT_TRUE(host.AllGather(kGroup, first->generation(), 0, 0, 0, "v").waits());
}

TEST(RendezvousTest, ANewRunMayHaveOtherOptions) {
  TestingHost host;
  const uint64_t first = host.JoinAll(kGroup, MakeOptions(2));
  EXPECT_TRUE(host.Leave(kGroup, first, 0, "done", true).ok());
  EXPECT_TRUE(host.Join(kGroup, 0, MakeOptions(1)).ok()) << "the others are gone";
  // Its coordinator died without a word.
  host.Pass(absl::Milliseconds(4999));
  EXPECT_FALSE(host.Join(kGroup, 0, MakeOptions(3)).ok());
  host.Pass(absl::Milliseconds(1));
  EXPECT_TRUE(host.Join(kGroup, 0, MakeOptions(3)).waits());
}

TEST(RendezvousTest, AWatchedGenerationIsNotIdle) {
  TestingHost host;
  const uint64_t generation = host.JoinAll(kGroup, MakeOptions(1));
  const AskedStatus watch = host.Watch(kGroup, generation);
  host.Pass(absl::Hours(1));
  EXPECT_EQ(host.Join(kGroup, 0, MakeOptions(3)).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(watch.waits());
}

TEST(RendezvousTest, RefusesExchangesOutOfRange) {
  TestingHost host;
  const uint64_t generation = host.JoinAll(kGroup, MakeOptions(2));
  const auto gather = [&](int rank, int key, int64_t step, size_t bytes) {
    return host.AllGather(kGroup, generation, rank, key, step, std::string(bytes, 'v')).status();
  };
  EXPECT_EQ(gather(2, 0, 0, 1), Invalid("rank is 2; it must be in 0 .. 1"));
  EXPECT_EQ(gather(-1, 0, 0, 1), Invalid("rank is -1; it must be in 0 .. 1"));
  EXPECT_EQ(gather(0, 16, 0, 1), Invalid("group_key is 16; it must be in 0 .. 15"));
  EXPECT_EQ(gather(0, -1, 0, 1), Invalid("group_key is -1; it must be in 0 .. 15"));
  EXPECT_EQ(gather(0, 0, -1, 1),
            Invalid("instance_key is -1; it must be in 0 .. 9223372036854775807"));
  EXPECT_EQ(gather(0, 0, 0, 65'537), Invalid("value has 65537 bytes; at most 65536 are allowed"));
  EXPECT_EQ(host->load().open_exchanges, 0u) << "nothing has changed";
  EXPECT_EQ(gather(0, 0, 0, 65'536).code(), absl::StatusCode::kUnknown) << "it waits";
  EXPECT_EQ(host.AllGather({7, "unknown"}, 5, 0, 0, 0, "v").status(),
            absl::AbortedError("group 'unknown': generation 5 is not known here; join again"));
}

TEST(RendezvousTest, ForgetsGroupsWithoutMembers) {
  TestingHost host;
  const uint64_t left = host.JoinAll({7, "left"}, MakeOptions(1));
  EXPECT_TRUE(host.Leave({7, "left"}, left, 0, "", true).ok());
  const uint64_t live = host.JoinAll({7, "live"}, MakeOptions(1));
  host.Join({7, "never-complete"}, 0, MakeOptions(2));
  const uint64_t bounded = host.JoinAll({7, "bounded"}, MakeOptions(1, v1::BOUNDED));
  EXPECT_TRUE(host.Leave({7, "bounded"}, bounded, 0, "", false).ok());
  host.Pass(absl::Milliseconds(4999));
  EXPECT_EQ(host->load().groups, 4u);
  host.Pass(absl::Milliseconds(1));
  EXPECT_EQ(host->load().groups, 1u);
  host.Pass(absl::Hours(1));
  EXPECT_TRUE(host.AllGather({7, "live"}, live, 0, 0, 0, "v").ok());
}

TEST(RendezvousTest, BoundsTheNumberOfGroups) {
  TestingHost host({.max_groups = 3});
  const uint64_t first = host.JoinAll({7, "1"}, MakeOptions(1));
  host.Pass(absl::Milliseconds(100));
  const AskedJoin joining = host.Join({7, "2"}, 0, MakeOptions(2, v1::SYNC, kMaxInt32));
  const uint64_t third = host.JoinAll({7, "3"}, MakeOptions(1));
  EXPECT_EQ(host.Join(kGroup, 0, MakeOptions(1)).status(),
            absl::ResourceExhaustedError(
                "group 'g': 3 groups are active here already; at most 3 are allowed"));
  EXPECT_TRUE(host.Leave({7, "3"}, third, 0, "", true).ok());
  EXPECT_TRUE(host.Join(kGroup, 0, MakeOptions(1)).ok()) << "in the place of one without members";
  host.Pass(absl::Milliseconds(4900));
  EXPECT_TRUE(host.Join({7, "5"}, 0, MakeOptions(1)).ok()) << "in the place of an idle one";
  EXPECT_EQ(host.AllGather({7, "1"}, first, 0, 0, 0, "v").status().code(),
            absl::StatusCode::kAborted);
  EXPECT_EQ(host->load().groups, 3u);
  EXPECT_TRUE(joining.waits());
}

TEST(RendezvousTest, BoundsTheBytesOfValues) {
  TestingHost host({.max_value_bytes = 100});
  const uint64_t generation = host.JoinAll(kGroup, MakeOptions(2));
  const AskedGather first = host.AllGather(kGroup, generation, 0, 0, 0, std::string(60, 'v'));
  EXPECT_EQ(host.AllGather(kGroup, generation, 1, 0, 0, std::string(41, 'w')).status(),
            absl::ResourceExhaustedError("group 'g': value has 41 bytes in addition to the 60 that "
                                         "are held already; at most 100 are allowed"));
  EXPECT_TRUE(host.AllGather(kGroup, generation, 1, 0, 0, std::string(40, 'w')).ok());
  EXPECT_TRUE(first.ok());
  EXPECT_FALSE(host.AllGather(kGroup, generation, 1, 0, 1, "v").ok());
  host.JoinAll(kGroup, MakeOptions(2));
  EXPECT_EQ(host->load().value_bytes, 0);
}

TEST(RendezvousTest, AThousandFailedStepsLeaveNothingBehind) {
  TestingHost host;
  std::vector<AskedGather> calls;
  for (int failed = 0; failed < 1000; ++failed) {
    const uint64_t generation = host.JoinAll(kGroup, MakeOptions(4));
    for (const int64_t step : {failed, failed + 1}) {
      for (int rank = 0; rank < 3; ++rank)
        calls.push_back(host.AllGather(kGroup, generation, rank, 0, step, "value"));
    }
    switch (failed % 3) {
      case 0:
        host.Pass(absl::Milliseconds(500));
        break;
      case 1:
        EXPECT_TRUE(host.Leave(kGroup, generation, 3, "gone", false).ok());
        break;
      case 2:
        host.Join(kGroup, 3, MakeOptions(4)).withdraw(absl::CancelledError("gone"));
        break;
    }
    const Rendezvous::Load load = host->load();
    ASSERT_EQ(load.groups, 1u);
    ASSERT_EQ(load.joining + load.waiting + load.open_exchanges + load.kept_exchanges, 0u);
    ASSERT_EQ(load.value_bytes, 0);
  }
  for (const AskedGather& call : calls) EXPECT_EQ(call.state->answers, 1);
  host.Pass(absl::Seconds(5));
  EXPECT_EQ(host->load().groups, 0u);
}

TEST(RendezvousTest, ClosingAnswersAll) {
  TestingHost host;
  const uint64_t generation = host.JoinAll(kGroup, MakeOptions(2));
  const AskedGather gather = host.AllGather(kGroup, generation, 0, 0, 0, "v");
  const AskedJoin join = host.Join({7, "other"}, 0, MakeOptions(2));
  const uint64_t bounded = host.JoinAll({7, "b"}, MakeOptions(2, v1::BOUNDED));
  const AskedStatus advance = host.Advance({7, "b"}, bounded, 1, 1, 1);
  host->Close(absl::UnavailableError("good night"));
  EXPECT_EQ(gather.status(), absl::UnavailableError("group 'g': good night"));
  EXPECT_EQ(join.status(), absl::UnavailableError("group 'other': good night"));
  EXPECT_EQ(advance.status(), absl::UnavailableError("group 'b': good night"));
  EXPECT_EQ(host.Join(kGroup, 0, MakeOptions(1)).status(), gather.status());
  EXPECT_EQ(host.AllGather(kGroup, generation, 0, 0, 0, "v").status(), gather.status());
  EXPECT_EQ(host->load().groups, 0u);
  host->Close(absl::UnavailableError("twice"));
  EXPECT_EQ(gather.state->answers + join.state->answers + advance.state->answers, 3);
}

TEST(RendezvousTest, AdoptsGenerationsOfAnotherHost) {
  TestingHost host;
  const v1::GroupOptions options = MakeOptions(2);
  EXPECT_FALSE(host->Knows(kGroup, 50));
  EXPECT_TRUE(host->Adopt(kGroup, 50, options));
  EXPECT_TRUE(host->Knows(kGroup, 50));
  const AskedGather first = host.AllGather(kGroup, 50, 0, 0, 0, "a");
  EXPECT_TRUE(host->Adopt(kGroup, 50, options)) << "another rank's join";
  EXPECT_TRUE(host->Adopt(kGroup, 40, options)) << "an old answer";
  EXPECT_TRUE(first.waits());
  EXPECT_TRUE(host->Adopt(kGroup, 60, options));
  EXPECT_EQ(first.status(), absl::AbortedError("group 'g': generation 50 is over; join again"));
  EXPECT_FALSE(host->Knows(kGroup, 50));

  host->End(kGroup, 50, absl::AbortedError("too late"));
  const AskedGather second = host.AllGather(kGroup, 60, 0, 0, 0, "a");
  EXPECT_TRUE(second.waits());
  host->End(kGroup, 60, absl::AbortedError("the host says so"));
  EXPECT_EQ(second.status(), absl::AbortedError("the host says so"));
  EXPECT_TRUE(host->Knows(kGroup, 60)) << "late members get the same";
  EXPECT_TRUE(host->Adopt(kGroup, 60, options)) << "it stays over";
  EXPECT_EQ(host.AllGather(kGroup, 60, 1, 0, 0, "b").status(), second.status());

  EXPECT_TRUE(host->Adopt(kGroup, 70, MakeOptions(1))) << "a new run";
  EXPECT_TRUE(host.AllGather(kGroup, 70, 0, 0, 0, "a").ok());
  host->Close(absl::UnavailableError("closed"));
  EXPECT_FALSE(host->Adopt(kGroup, 80, options));
}

// Hosts count by themselves, and no clock: a host that was started again must not give out what a
// late call of before may name.
TEST(RendezvousTest, NoTwoLivesOfAHostCountAlike) {
  std::set<uint64_t> begins;
  for (int life = 0; life < 50; ++life) {
    TestingHost host;
    const uint64_t first = host.JoinAll(kGroup, MakeOptions(1));
    EXPECT_EQ(host.JoinAll(kGroup, MakeOptions(1)), first + 1);
    EXPECT_TRUE(HasBeen(first, first + 1));
    EXPECT_TRUE(HasBeen(first, first));
    EXPECT_FALSE(HasBeen(first + 1, first));
    for (const uint64_t other : begins)
      EXPECT_FALSE(HasBeen(other, first) || HasBeen(first, other));
    begins.insert(first);
  }
}

TEST(RendezvousTest, ForgetsAGroupThatNobodyIsIn) {
  TestingHost host;
  EXPECT_TRUE(host->Forget(kGroup).ok()) << "it does not know it";
  const AskedJoin joining = host.Join(kGroup, 0, MakeOptions(2));
  EXPECT_TRUE(absl::IsFailedPrecondition(host->Forget(kGroup)));
  EXPECT_TRUE(joining.waits());
  const uint64_t generation = host.Join(kGroup, 1, MakeOptions(2))->generation();
  EXPECT_EQ(host->Forget(kGroup),
            absl::FailedPreconditionError(
                "group 'g': some of its ranks are active; drop it when they have left"));
  ASSERT_TRUE(host.Leave(kGroup, generation, 0, "done", true).ok());
  EXPECT_TRUE(host->Forget(kGroup).ok());
  EXPECT_EQ(host->load().groups, 0u);

  // Whoever was in it may have died without a word.
  ASSERT_NE(host.JoinAll(kGroup, MakeOptions(2, v1::SYNC, 100)), 0u);
  host.Pass(absl::Milliseconds(999));
  EXPECT_TRUE(absl::IsFailedPrecondition(host->Forget(kGroup)));
  host.Pass(absl::Milliseconds(1));
  EXPECT_TRUE(host->Forget(kGroup).ok());
}

// With its own thread and the real clock: deadlines come without anybody calling.
TEST(RendezvousTest, WatchesDeadlinesByItself) {
  Rendezvous rendezvous;
  for (int round = 0; round < 3; ++round) {
    // A later deadline first: the thread must not sleep through the earlier one.
    absl::Notification late, early;
    absl::Status late_status, early_status;
    rendezvous.Join(JoinOf({7, "late"}, 0, MakeOptions(2, v1::SYNC, 60), "c"),
                    [&](const auto& result) {
                      late_status = result.status();
                      late.Notify();
                    });
    rendezvous.Join(JoinOf({7, "early"}, 0, MakeOptions(2, v1::SYNC, 20), "c"),
                    [&](const auto& result) {
                      early_status = result.status();
                      early.Notify();
                    });
    early.WaitForNotification();
    late.WaitForNotification();
    EXPECT_EQ(early_status,
              absl::DeadlineExceededError("group 'early': rank 1 did not join within 20 ms"));
    EXPECT_EQ(late_status,
              absl::DeadlineExceededError("group 'late': rank 1 did not join within 60 ms"));
  }
}

}  // namespace rendezvous_test
}  // namespace emberd::group::testing
