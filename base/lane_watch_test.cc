// How a caller waits for its answer: asleep, or looking for it first. What must hold: a call ends
// as it should either way, and nobody who looks in vain, or beside others, goes on taking a core.
//
// Covers: lanes.cc
#include <atomic>
#include <fstream>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <time.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/lanes.h"
#include "base/testing/await.h"
#include "base/testing/lane_ends.h"

namespace emberd {
namespace lane_watch_test {

using lane_ends::Ask;
using lane_ends::Echo;
using lane_ends::kLong;
using lane_ends::Late;
using lane_ends::PoolTo;
using lane_ends::SendTo;
using lane_ends::Serve;

double CpuSeconds(clockid_t clock) {
  timespec time = {};
  clock_gettime(clock, &time);
  return absl::ToDoubleSeconds(absl::DurationFromTimespec(time));
}

bool IsAsleep(pid_t thread) {
  std::string text;
  std::getline(std::ifstream(absl::StrCat("/proc/self/task/", thread, "/stat")), text);
  const size_t name_end = text.rfind(") ");
  return name_end != std::string::npos && text[name_end + 2] == 'S';
}

// Callers that sleep at once, and that look for their answer first.
class WatchedLane : public ::testing::TestWithParam<absl::Duration> {};
INSTANTIATE_TEST_SUITE_P(, WatchedLane, ::testing::Values(absl::ZeroDuration(), kLong));

// Would catch: a call that hangs, or takes a late answer for that to the next call.
TEST_P(WatchedLane, ACallEndsAtItsDeadline) {
  absl::Notification begun, end;
  std::atomic<int> calls = 0;
  std::atomic<bool> cancelled = false;
  const auto server = Serve([&](LaneCall* call) {
    if (calls++ == 0) {
      call->OnCancel([&] { cancelled = true; });
      begun.Notify();
      end.WaitForNotification();
    }
    return Echo(call);
  });
  const auto pool = PoolTo(*server, 8, GetParam());
  auto stuck = SendTo(*pool, "first");
  begun.WaitForNotification();
  const auto answer =
      stuck->Receive(absl::Now() + absl::Milliseconds(20), absl::InfiniteDuration());
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->status, absl::DeadlineExceededError("Deadline Exceeded"));
  stuck = nullptr;
  EXPECT_TRUE(Eventually([&] { return cancelled.load(); })) << "the server hears of it";
  EXPECT_THAT(Ask(*pool, "second"), ::testing::HasSubstr("second"));
  end.Notify();
  EXPECT_THAT(Ask(*pool, "third"), ::testing::HasSubstr("third"));
}

TEST_P(WatchedLane, ASilentServerIsAskedInAnotherWay) {
  absl::Notification end;
  const auto server = Serve([&](LaneCall* call) {
    end.WaitForNotification();
    return Echo(call);
  });
  const auto pool = PoolTo(*server, 8, GetParam());
  EXPECT_FALSE(SendTo(*pool)->Receive(Late(), absl::Milliseconds(20)).has_value());
  end.Notify();
}

TEST_P(WatchedLane, ACallCanBeCancelled) {
  absl::Notification begun, cancelled;
  const auto server = Serve([&](LaneCall* call) {
    call->OnCancel([&] { cancelled.Notify(); });
    begun.Notify();
    cancelled.WaitForNotification();
    return Echo(call);
  });
  const auto pool = PoolTo(*server, 8, GetParam());
  const auto call = SendTo(*pool);
  std::thread canceller([&] {
    begun.WaitForNotification();
    call->Cancel();
  });
  const auto answer = call->Receive(absl::InfiniteFuture());
  canceller.join();
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->status, absl::CancelledError("CANCELLED"));
  EXPECT_TRUE(cancelled.WaitForNotificationWithTimeout(kLong)) << "the server hears of it";
}

// A thread that looks for its answer takes a core from others; one that sleeps takes none.
TEST(LaneWatch, ALoneCallIsWatched) {
  const auto server = Serve(Echo);
  const auto pool = PoolTo(*server, 8, kLong), sleeper = PoolTo(*server);
  for (int call = 1; call <= 5; ++call) {
    EXPECT_NE(Ask(*pool), "");
    EXPECT_EQ(pool->watches(), call);
    EXPECT_NE(Ask(*sleeper), "");
  }
  EXPECT_EQ(sleeper->watches(), 0);
}

TEST(LaneWatch, ASlowServerIsWatchedLessAndLess) {
  // It answers when its caller has looked for the answer in vain.
  const auto server = Serve([caller = gettid()](LaneCall* call) {
    EXPECT_TRUE(Eventually([&] { return IsAsleep(caller); }));
    return Echo(call);
  });
  const auto pool = PoolTo(*server, 8, absl::Milliseconds(1));
  for (int call = 1; call <= 20; ++call) {
    EXPECT_NE(Ask(*pool), "");
    // The 1st, the 6th and the 15th, as after 4 and after 8 calls.
    EXPECT_EQ(pool->watches(), call < 6 ? 1 : call < 15 ? 2 : 3) << call;
  }
}

TEST(LaneWatch, CallersThatAreNotAloneSleep) {
  std::latch begun(3);
  absl::Notification end;
  const auto server = Serve([&](LaneCall* call) {
    begun.arrive_and_wait();
    end.WaitForNotification();
    return Echo(call);
  });
  const auto pool = PoolTo(*server, 8, kLong);
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i) {
    callers.emplace_back(
        [call = SendTo(*pool)] { EXPECT_TRUE(call->Receive(Late()).has_value()); });
  }
  begun.arrive_and_wait();
  EXPECT_TRUE(Eventually([&] {  // once both wait
    const double before = CpuSeconds(CLOCK_PROCESS_CPUTIME_ID);
    absl::SleepFor(absl::Milliseconds(100));
    return CpuSeconds(CLOCK_PROCESS_CPUTIME_ID) - before < 0.02;
  }));
  end.Notify();
  for (std::thread& caller : callers) caller.join();
}

}  // namespace lane_watch_test
}  // namespace emberd
