#include "tests/bench/demo/cluster.h"

#include <atomic>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "base/testing/paths.h"
#include "tests/bench/demo/display.h"

namespace emberd::demo {
namespace cluster_test {

using testing::ElementsAre;
using testing::HasSubstr;

client::ClusterStatus Status(bool reachable, uint64_t incarnation, int64_t gathered,
                             int64_t updated) {
  client::ClusterStatus status;
  client::ShardStatus& shard = status.shards.emplace_back();
  shard.address = "127.0.0.1:1";
  shard.reachable = reachable;
  shard.error = "connection refused";
  shard.incarnation = incarnation;
  shard.rows_gathered = gathered;
  shard.rows_updated = updated;
  return status;
}

TEST(ShardHistoryTest, CountsRowsPerSecond) {
  ShardHistory history;
  std::vector<std::string> events;
  const absl::Time start = absl::UnixEpoch();
  history.Add(Status(true, 7, 100, 10), start, &events);
  history.Add(Status(true, 7, 600, 110), start + absl::Seconds(2), &events);
  EXPECT_EQ(history.traffic()[0].rows_gathered, 600);
  EXPECT_EQ(history.traffic()[0].rows_updated, 110);
  EXPECT_DOUBLE_EQ(history.traffic()[0].rows_per_second, 300);
  EXPECT_TRUE(events.empty());
}

// A restarted shard counts from zero: the totals of the demo must neither fall nor jump.
TEST(ShardHistoryTest, SaysThatAShardDiedAndCameBack) {
  ShardHistory history;
  std::vector<std::string> events;
  absl::Time now = absl::UnixEpoch();
  history.Add(Status(true, 7, 1000, 100), now += absl::Seconds(1), &events);
  history.Add(Status(false, 0, 0, 0), now += absl::Seconds(1), &events);
  EXPECT_FALSE(history.traffic()[0].reachable);
  history.Add(Status(false, 0, 0, 0), now += absl::Seconds(1), &events);
  history.Add(Status(true, 8, 50, 5), now += absl::Seconds(1), &events);
  EXPECT_THAT(events, ElementsAre(HasSubstr("does not answer: connection refused"),
                                  HasSubstr("answers again"), HasSubstr("has restarted")));
  EXPECT_EQ(history.traffic()[0].rows_gathered, 1050);
  EXPECT_EQ(history.traffic()[0].rows_updated, 105);
  EXPECT_EQ(history.traffic()[0].restarts, 1);
}

TEST(MonitorTest, SaysOnceThatTheCoordinatorIsAway) {
  std::atomic<int> calls = 0;
  Monitor monitor([&calls]() -> absl::StatusOr<client::ClusterStatus> {
    ++calls;
    return absl::UnavailableError("away");
  });
  while (calls == 0) absl::SleepFor(absl::Milliseconds(1));
  std::vector<std::string> events;
  while (events.empty()) {
    absl::SleepFor(absl::Milliseconds(1));
    events = monitor.TakeEvents();
  }
  EXPECT_THAT(events, ElementsAre(HasSubstr("coordinator does not answer")));
  EXPECT_EQ(monitor.Restarts(), 0);
}

TEST(ProgressLineTest, ShowsAllThatIsAsked) {
  Progress progress{.examples = 500'000,
                    .total = 1'000'000,
                    .examples_per_second = 31'250,
                    .loss = 0.5,
                    .auc = 0.789,
                    .rows_touched = 12'300'000};
  progress.shards.resize(2);
  progress.shards[0].rows_per_second = 510'000;
  progress.shards[1].reachable = false;
  EXPECT_EQ(ProgressLine(progress),
            "[##########..........] 50%  500.0 k examples  31.2 k/s  training loss 0.5000  "
            "training AUC 0.7890  "
            "12.30 M rows touched  "
            "shards 0.51 down M rows/s");
  progress.held_out_auc = 0.7765;
  EXPECT_THAT(ProgressLine(progress),
              ::testing::HasSubstr("  training AUC 0.7890  held-out AUC 0.7765  12.30 M rows"));
}

TEST(WrapProgressTest, CutsBetweenParts) {
  EXPECT_EQ(WrapProgress("one  two  three", 80), "one  two  three");
  EXPECT_EQ(WrapProgress("one  two  three", 9), "one  two\nthree");
  EXPECT_EQ(WrapProgress("one  two  three", 8), "one  two\nthree");
  EXPECT_EQ(WrapProgress("one  two  three", 7), "one\ntwo\nthree");
  EXPECT_EQ(WrapProgress("one  three", 4), "one\nthre");
}

TEST(ShortTest, ThreeDigitsAreEnough) {
  EXPECT_EQ(Short(0), "0");
  EXPECT_EQ(Short(999), "999");
  EXPECT_EQ(Short(1000), "1.0 k");
  EXPECT_EQ(Short(999'900), "1.00 M");
  EXPECT_EQ(Short(1'250'000), "1.25 M");
}

TEST(ClusterTest, FieldsOfTheReadyLine) {
  const std::string line = "emberd: ready coordinator=127.0.0.1:7400 http= shards=4 pids=1,2";
  EXPECT_EQ(FieldOf(line, "coordinator"), "127.0.0.1:7400");
  EXPECT_EQ(FieldOf(line, "http"), "");
  EXPECT_EQ(FieldOf(line, "pids"), "1,2");
  EXPECT_EQ(FieldOf(line, "nothing"), "");
}

TEST(ClusterTest, ServerThatIsNotThereOrDoesNotStart) {
  const auto never = [] { return false; };
  const std::string log = TempPath("cluster.log");
  EXPECT_EQ(Cluster::Start({"/no/such/emberd", 1, 1, 2, log}, never).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(Cluster::Start({"/bin/false", 1, 1, 2, log}, never).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(Cluster::Start({"/usr/bin/yes", 1, 1, 2, log}, [] { return true; }).status().code(),
            absl::StatusCode::kCancelled);
}

}  // namespace cluster_test
}  // namespace emberd::demo
