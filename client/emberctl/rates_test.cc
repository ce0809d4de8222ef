// Rates are what people act on: these tests catch counts that are taken for rates, quantiles beside
// their bucket, and the huge numbers that a restart makes of a difference.

#include "client/emberctl/output.h"
#include "client/emberctl/stats_view.h"
#include "client/emberctl/testing_emberctl.h"
#include "gmock/gmock.h"

namespace emberd::emberctl {
namespace rates_test {

using ::testing::Contains;
using ::testing::HasSubstr;

TEST(QuantileTest, LiesInsideItsBucket) {
  v1::Distribution distribution;
  EXPECT_EQ(Quantile(distribution, 0.5), 0);
  FillDistribution(10, &distribution);
  EXPECT_DOUBLE_EQ(Quantile(distribution, 0.25), 0.0005);
  EXPECT_DOUBLE_EQ(Quantile(distribution, 0.5), 0.001);
  EXPECT_DOUBLE_EQ(Quantile(distribution, 0.75), 0.001 + 0.009 / 2);
  EXPECT_DOUBLE_EQ(Quantile(distribution, 1), 0.01);
  distribution.mutable_buckets(2)->set_count(30);  // most are beyond all bounds
  distribution.set_count(30);
  EXPECT_DOUBLE_EQ(Quantile(distribution, 0.9), 0.01);
}

TEST(RatesTest, AreDifferencesOfTwoAnswers) {
  const v1::GetStatsResponse before = StatsAfter(10);
  v1::GetStatsResponse now = StatsAfter(14);
  (*now.mutable_groups(0)->mutable_last_arrivals())["0"] += 1000;
  ASSERT_TRUE(SameLife(before, now));
  const Rates rates = RatesBetween(before, now);
  EXPECT_DOUBLE_EQ(rates.seconds, 4);
  ASSERT_EQ(rates.stats.methods_size(), 2);
  EXPECT_EQ(rates.stats.methods(0).seconds().count(), 400);
  EXPECT_EQ(Errors(rates.stats.methods(0)), 4);
  EXPECT_EQ(rates.stats.methods(0).request_bytes(), 4 * 10'240);
  EXPECT_DOUBLE_EQ(Quantile(rates.stats.methods(0).seconds(), 0.5), 0.001);
  EXPECT_NEAR(rates.stats.methods(0).seconds().sum(), 1.6, 1e-9);
  EXPECT_EQ(rates.stats.methods(1).seconds().count(), 0);
  EXPECT_EQ(Quantile(rates.stats.methods(1).seconds(), 0.99), 0);
  EXPECT_EQ(rates.stats.stages(0).seconds().count(), 400);
  EXPECT_EQ(rates.stats.stacks(0).ids(), 4000);
  EXPECT_EQ(rates.stats.shards(0).rows_gathered(), 8000);
  EXPECT_EQ(rates.stats.shards(1).rows_gathered(), 0);
  EXPECT_EQ(rates.stats.groups(0).updates(), 200);
  EXPECT_DOUBLE_EQ(rates.stats.groups(0).wait_seconds(), 1);
  EXPECT_EQ(LastRank(rates.stats.groups(0)).first, "0");  // lately, though not in all
  EXPECT_DOUBLE_EQ(LastRank(rates.stats.groups(0)).second, 1040.0 / 1160);
}

// Would catch: half of the ids, or an eighth, where all of a batch are distinct, as those of one
// source slot are counted.
TEST(RatesTest, UniqueIdsAreThoseOfAllSourceSlots) {
  v1::GetStatsResponse now = StatsAfter(10);
  const v1::StackStats& stack = now.stacks(0);
  ASSERT_EQ(100 * stack.unique_ids() / stack.ids(), 25);
  EXPECT_THAT(TopFrame(TotalsOf(now), "here:1", {}), Contains(HasSubstr("  25%  ")));
  for (int i = 0; i < 2; ++i) now.mutable_shards(0)->add_partitions();
  EXPECT_THAT(TopFrame(TotalsOf(now), "here:1", {}), Contains(HasSubstr("  50%  ")));
}

TEST(RatesTest, AShardThatRestartedCountsFromItsStart) {
  v1::GetStatsResponse before = StatsAfter(10);
  v1::GetStatsResponse now = StatsAfter(14);
  now.mutable_shards(0)->set_incarnation(78);
  now.mutable_shards(0)->set_rows_gathered(30'000);  // more than before, and yet all new
  now.mutable_shards(1)->set_reachable(true);
  now.mutable_shards(1)->set_incarnation(5);
  now.mutable_shards(1)->set_rows_gathered(1'000'000);  // since when, nobody knows
  const Rates rates = RatesBetween(before, now);
  EXPECT_EQ(rates.stats.shards(0).rows_gathered(), 30'000);
  EXPECT_EQ(rates.stats.shards(1).rows_gathered(), 0);
}

TEST(RatesTest, TotalsAreThoseSinceTheStart) {
  const Rates rates = TotalsOf(StatsAfter(10));
  EXPECT_DOUBLE_EQ(rates.seconds, 10);
  EXPECT_EQ(rates.stats.methods(0).seconds().count(), 1000);
  EXPECT_EQ(rates.stats.shards(0).rows_gathered(), 20'000);
  EXPECT_EQ(LastRank(rates.stats.groups(0)).first, "1");
}

// Would catch: all that a shard has done in its life, as done since a coordinator has started.
TEST(RatesTest, TotalsOfAShardAreThoseSinceItsOwnStart) {
  v1::GetStatsResponse now = StatsAfter(10);
  now.mutable_shards(0)->set_uptime_ms(40'000);
  const Rates totals = TotalsOf(now);
  EXPECT_DOUBLE_EQ(totals.SecondsOf(totals.stats.shards(0)), 40);
  EXPECT_EQ(StatsJson(totals)["shards"][0]["rows_gathered_per_second"], 500.0f);
  EXPECT_THAT(TopFrame(totals, "here:1", {}), Contains(HasSubstr("  500         125  ")));
  const Rates rates = RatesBetween(StatsAfter(6), now);
  EXPECT_DOUBLE_EQ(rates.SecondsOf(rates.stats.shards(0)), 4);
}

TEST(RatesTest, AnotherLifeIsNoticed) {
  v1::GetStatsResponse restarted = StatsAfter(14);
  restarted.set_uptime_ms(2000);
  EXPECT_FALSE(SameLife(StatsAfter(10), restarted));
  EXPECT_FALSE(SameLife(StatsAfter(10), StatsAfter(10)));  // no time between them
}

}  // namespace rates_test
}  // namespace emberd::emberctl
