#include "server/step/served_model.h"

#include <string>

#include <gtest/gtest.h>

namespace emberd::step {
namespace served_model_test {

TEST(CountSketchTest, BucketsAreNarrowAndInOrder) {
  for (int64_t count = 0; count <= 16; ++count) EXPECT_EQ(CountSketch::Upper(count), count);
  EXPECT_EQ(CountSketch::Upper(17), 18);
  EXPECT_EQ(CountSketch::Upper(18), 18);
  EXPECT_EQ(CountSketch::Upper(19), 20);
  EXPECT_EQ(CountSketch::Upper(32), 32);
  EXPECT_EQ(CountSketch::Upper(33), 36);
  int64_t last = 0;
  for (int64_t count = 1; count < 100'000; ++count) {
    const int64_t upper = CountSketch::Upper(count);
    ASSERT_GE(upper, count);
    ASSERT_GE(upper, last);
    ASSERT_LE(upper, count + count / 8);
    ASSERT_EQ(CountSketch::Upper(upper), upper);
    last = upper;
  }
}

preprocess::StackPlan Stack(const std::string& name, int max_ids, int max_unique_ids) {
  preprocess::StackPlan stack;
  stack.name = name;
  stack.limits.ids = max_ids;
  stack.limits.unique = max_unique_ids;
  return stack;
}

TEST(MissingGradientsTest, CountsAllAndNamesEachOnce) {
  v1::ModelConfig config;
  config.set_name("ctr");
  for (const char* name : {"user", "item"}) config.add_features()->set_name(name);
  MissingGradients missing(2);
  testing::internal::CaptureStderr();
  EXPECT_EQ(missing.Observe(config, {true, true}), 0);
  EXPECT_EQ(missing.Observe(config, {true, false}), 1);
  EXPECT_EQ(missing.Observe(config, {false, false}), 2);
  EXPECT_EQ(missing.Observe(config, {false, false}), 2);
  const std::string log = testing::internal::GetCapturedStderr();
  for (const char* name : {"user", "item"}) {
    const size_t first = log.find(name);
    ASSERT_NE(first, std::string::npos) << log;
    EXPECT_EQ(log.find(name, first + 1), std::string::npos) << log;
  }
}

TEST(ObservedCountsTest, KeepsTheMaximumAndHowOften) {
  preprocess::Plan plan;
  plan.stacks = {Stack("a", 7, 0), Stack("b", 0, 9)};
  ObservedCounts counts(2);
  for (int n = 0; n < 10; ++n) {
    v1::BatchStatistics statistics;
    statistics.add_stacks()->set_max_ids_per_partition(n < 9 ? 3 : 1001);
    statistics.mutable_stacks(0)->set_max_unique_ids_per_partition(n);
    statistics.add_stacks();
    counts.Observe(statistics);
  }
  const v1::GetLimitsResponse limits = counts.Limits(plan);
  ASSERT_EQ(limits.stacks_size(), 2);
  const v1::StackLimits& a = limits.stacks(0);
  EXPECT_EQ(a.stack(), "a");
  EXPECT_EQ(a.max_ids_per_partition(), 7);
  EXPECT_EQ(a.ids().max(), 1001);
  ASSERT_EQ(a.ids().buckets_size(), 2);
  EXPECT_EQ(a.ids().buckets(0).upper(), 3);
  EXPECT_EQ(a.ids().buckets(0).count(), 9);
  EXPECT_EQ(a.ids().buckets(1).upper(), 1024);
  EXPECT_EQ(a.unique_ids().buckets_size(), 10);
  EXPECT_EQ(limits.stacks(1).max_unique_ids_per_partition(), 9);
  EXPECT_EQ(limits.stacks(1).ids().max(), 0);
}

}  // namespace served_model_test
}  // namespace emberd::step
