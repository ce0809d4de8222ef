// What this would catch: a coordinator that comes back and shows as a burst of traffic, or one that
// was started anew and shows as none; latencies that mix up with those of before; a history that
// grows without end, or has holes where it is thinned.
#include "server/status_page/history.h"

#include <cmath>
#include <limits>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

// Covers: figures.cc

namespace emberd::status_page {
namespace history_test {

using ::testing::ElementsAre;
using ::testing::Pair;

constexpr int64_t kStart = 1'000'000;

// A coordinator that has made `rate` steps a second for `seconds`, half of its lookups in 10 to
// 20 ms and half in 20 to 40 ms; of ten, one failed.
v1::GetStatsResponse Stats(int64_t seconds, int64_t rate) {
  v1::GetStatsResponse stats;
  const int64_t steps = seconds * rate;
  stats.set_time_ms(kStart + 1000 * seconds);
  stats.set_uptime_ms(1000 * seconds);
  stats.set_train_streams(1);
  for (const char* name : {"a", "b"}) {
    v1::StackStats* const stack = stats.add_stacks();
    stack->set_model("m");
    stack->set_stack(name);
    stack->set_batches(steps);
    stack->set_largest_ids_per_partition(rate);
  }
  v1::MethodStats* const lookup = stats.add_methods();
  lookup->set_method("EmbeddingService/Lookup");
  (*lookup->mutable_codes())["OK"] = steps;
  (*lookup->mutable_codes())["UNAVAILABLE"] = steps / 10;
  lookup->set_request_bytes(100 * steps);
  lookup->set_response_bytes(1000 * steps);
  lookup->mutable_seconds()->set_count(steps);
  const std::pair<double, int64_t> buckets[] = {{0.01, 0},
                                                {0.02, steps / 2},
                                                {0.04, steps},
                                                {std::numeric_limits<double>::infinity(), steps}};
  for (const auto& [upper, count] : buckets) {
    auto* const bucket = lookup->mutable_seconds()->add_buckets();
    bucket->set_upper(upper);
    bucket->set_count(count);
  }
  v1::GroupStats* const group = stats.add_groups();
  group->set_model("m");
  group->set_group("nightly");
  group->set_updates(steps);
  (*group->mutable_last_arrivals())["0"] = steps;
  return stats;
}

CoordinatorFigures Coordinator(const std::string& name, const v1::GetStatsResponse& stats) {
  return {.name = name, .stats = stats};
}
CoordinatorFigures OutOfReach(const std::string& name) {
  return {.name = name, .status = absl::UnavailableError("nobody there")};
}

TEST(FiguresTest, SumsCoordinators) {
  const v1::GetStatsResponse sum =
      Merge({Coordinator("coordinator-0", Stats(10, 20)),
             Coordinator("coordinator-1", Stats(10, 30)), OutOfReach("coordinator-2")});
  EXPECT_EQ(sum.train_streams(), 2);
  ASSERT_EQ(sum.stacks_size(), 2);
  EXPECT_EQ(sum.stacks(1).batches(), 500);
  EXPECT_EQ(sum.stacks(1).largest_ids_per_partition(), 30);
  ASSERT_EQ(sum.methods_size(), 1);
  EXPECT_EQ(sum.methods(0).codes().at("UNAVAILABLE"), 50);
  EXPECT_EQ(sum.methods(0).seconds().count(), 500);
  EXPECT_EQ(sum.methods(0).seconds().buckets(1).count(), 250);
  ASSERT_EQ(sum.groups_size(), 1);
  EXPECT_THAT(sum.groups(0).last_arrivals(), ElementsAre(Pair("0", 500)));
  EXPECT_EQ(sum.uptime_ms(), 10000);
}

TEST(FiguresTest, RatesAreThoseOfAllWhoAnsweredBothTimes) {
  const ClusterFigures before = {Coordinator("coordinator-0", Stats(10, 20)),
                                 Coordinator("coordinator-1", Stats(10, 30)),
                                 OutOfReach("coordinator-2")};
  // The last one comes back, with much behind it.
  const ClusterFigures now = {Coordinator("coordinator-0", Stats(12, 20)),
                              Coordinator("coordinator-1", Stats(12, 30)),
                              Coordinator("coordinator-2", Stats(12, 1'000'000))};
  const Point point = Latest({before, now}, 1, 1);
  EXPECT_EQ(point.time_ms, kStart + 12000);
  EXPECT_DOUBLE_EQ(point.at(Value::kLookups), 50);
  EXPECT_DOUBLE_EQ(point.at(Value::kUpdates), 50);
  EXPECT_DOUBLE_EQ(point.at(Value::kBytesSent), 50'000);
  EXPECT_DOUBLE_EQ(point.at(Value::kErrors), 5);
  EXPECT_THAT(point.errors, ElementsAre(Pair("UNAVAILABLE", 5)));
  EXPECT_DOUBLE_EQ(LookupsPerSecond({before, now}, 1, 1), 30);
  EXPECT_DOUBLE_EQ(LookupsPerSecond({before, now}, 2, 1), 0);
}

TEST(FiguresTest, ACoordinatorThatWasStartedAnewCountsFromItsSecondAnswer) {
  const ClusterFigures before = {Coordinator("coordinator-0", Stats(10, 20)),
                                 Coordinator("coordinator-1", Stats(10, 30))};
  v1::GetStatsResponse anew = Stats(1, 30);
  anew.set_time_ms(kStart + 12000);
  const ClusterFigures now = {Coordinator("coordinator-0", Stats(12, 20)),
                              Coordinator("coordinator-1", anew)};
  EXPECT_DOUBLE_EQ(Latest({before, now}, 1, 1).at(Value::kLookups), 20);
}

TEST(FiguresTest, OneThatCameLaterCountsFromItsFirstAnswer) {
  RecentFigures recent;
  for (int64_t second = 10; second <= 20; ++second) {
    recent.push_back({Coordinator("coordinator-0", Stats(second, 20)),
                      second < 16 ? OutOfReach("coordinator-1")
                                  : Coordinator("coordinator-1", Stats(second, 30))});
  }
  const Point point = Latest(recent, 2000, 10000);
  EXPECT_DOUBLE_EQ(point.at(Value::kLookups), 50);
  EXPECT_NEAR(point.at(Value::kLookupMedian), 0.02, 1e-9);
  EXPECT_DOUBLE_EQ(LookupsPerSecond(recent, 1, 10000), 30);
}

TEST(FiguresTest, LatenciesAreOfTheTimeBetween) {
  v1::GetStatsResponse now = Stats(20, 10);
  // All that came since are slow.
  for (auto& bucket : *now.mutable_methods(0)->mutable_seconds()->mutable_buckets()) {
    if (bucket.upper() < 0.03) bucket.set_count(bucket.upper() < 0.015 ? 0 : 50);
  }
  const ClusterFigures before = {Coordinator("coordinator-0", Stats(10, 10))};
  const Point point = Latest({before, {Coordinator("coordinator-0", now)}}, 1, 1);
  EXPECT_NEAR(point.at(Value::kLookupMedian), 0.03, 1e-9);
  EXPECT_NEAR(point.at(Value::kLookup99), 0.0398, 1e-9);
  EXPECT_TRUE(std::isnan(point.at(Value::kApplyMedian)));  // none came
}

TEST(FiguresTest, RowsAreThoseOfShardsInTheSameLife) {
  ClusterFigures figures[2];
  for (int i = 0; i < 2; ++i) {
    v1::GetStatsResponse stats = Stats(10 + 2 * i, 1);
    for (int shard = 0; shard < 3; ++shard) {
      v1::ShardStatus* const to = stats.add_shards();
      to->set_index(shard);
      to->set_reachable(true);
      to->set_incarnation(shard == 1 ? 7 + i : 7);
      to->set_rows_gathered(1000 * (i + 1) * (shard + 1));
    }
    figures[i] = {Coordinator("coordinator-0", stats)};
  }
  EXPECT_DOUBLE_EQ(Latest({figures[0], figures[1]}, 1, 1).at(Value::kRowsGathered), 500 + 1500);
}

nlohmann::json Points(const History& history, int64_t since = 0) {
  return nlohmann::json::parse(history.ToJson(since), nullptr, false)["points"];
}

TEST(HistoryTest, BeginsWithAGapAndGoesOnWithRates) {
  History history;
  history.Add({Coordinator("coordinator-0", Stats(0, 10))});
  history.Add({Coordinator("coordinator-0", Stats(1, 10))});
  history.Add({Coordinator("coordinator-0", Stats(2, 10))});
  const nlohmann::json all = nlohmann::json::parse(history.ToJson(), nullptr, false);
  EXPECT_EQ(all["keys"][0], "lookups");
  EXPECT_EQ(all["keys"].back(), "error UNAVAILABLE");
  ASSERT_EQ(all["points"].size(), 3u);
  EXPECT_EQ(all["points"][0][0], kStart);
  EXPECT_TRUE(all["points"][0][1].is_null());
  EXPECT_TRUE(all["points"][0].back().is_null());
  EXPECT_EQ(all["points"][2][1], 10);
  EXPECT_EQ(all["points"][2].back(), 1);
  EXPECT_EQ(all["points"][2].size(), 1 + all["keys"].size());
  EXPECT_EQ(Points(history, kStart + 1000).size(), 1u);
}

TEST(HistoryTest, FiguresThatComeTooSoonMakeNoPoint) {
  History history;
  v1::GetStatsResponse stats = Stats(0, 10);
  for (int i = 0; i < 20; ++i) {
    stats.set_time_ms(kStart + 100 * i);
    history.Add({Coordinator("coordinator-0", stats)});
  }
  EXPECT_EQ(Points(history).size(), 3u);  // at 0, 900 and 1800 ms
}

TEST(HistoryTest, KeepsAnHourInCoarserStepsTheOlderItIs) {
  History history;
  constexpr int kSeconds = 2 * 3600;
  for (int i = 0; i <= kSeconds; ++i) history.Add({Coordinator("coordinator-0", Stats(i, 10))});
  const nlohmann::json points = Points(history);
  EXPECT_EQ(points.back()[0], kStart + 1000 * kSeconds);
  EXPECT_NEAR(points[0][0].get<int64_t>(), kStart + 1000 * kSeconds - History::kKeepMs, 5000);
  EXPECT_NEAR(static_cast<double>(points.size()), 300 + 3300 / 5, 3);
  for (size_t i = 1; i < points.size(); ++i) {
    const int64_t step = points[i][0].get<int64_t>() - points[i - 1][0].get<int64_t>();
    EXPECT_GT(step, 0);
    EXPECT_LE(step, 5000);
  }
}

TEST(HistoryTest, AClockThatIsSetBackBeginsAnew) {
  History history;
  for (const int64_t second : {100, 101, 50, 51}) {
    history.Add({Coordinator("coordinator-0", Stats(second, 10))});
  }
  const nlohmann::json points = Points(history);
  ASSERT_EQ(points.size(), 2u);
  EXPECT_EQ(points[0][0], kStart + 50000);
}

}  // namespace history_test
}  // namespace emberd::status_page
