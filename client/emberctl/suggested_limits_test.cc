#include <vector>

#include "client/emberctl/plan_view.h"
#include "gtest/gtest.h"

namespace emberd::emberctl {
namespace suggested_limits_test {

v1::CountSketch Sketch(const std::vector<std::pair<int64_t, int64_t>>& buckets, int64_t max) {
  v1::CountSketch sketch;
  sketch.set_max(max);
  for (const auto& [upper, count] : buckets) {
    sketch.add_buckets()->set_upper(upper);
    sketch.mutable_buckets(sketch.buckets_size() - 1)->set_count(count);
  }
  return sketch;
}

TEST(LimitsTest, Quantiles) {
  const v1::CountSketch sketch = Sketch({{3, 50}, {8, 40}, {1024, 10}}, 1001);
  EXPECT_EQ(Quantile(sketch, 0.5), 3);
  EXPECT_EQ(Quantile(sketch, 0.51), 8);
  EXPECT_EQ(Quantile(sketch, 0.9), 8);
  EXPECT_EQ(Quantile(sketch, 0.99), 1001);  // never above the maximum
  EXPECT_EQ(Quantile(v1::CountSketch(), 0.5), 0);
}

TEST(LimitsTest, SketchesOfCoordinatorsAdd) {
  v1::CountSketch sketch = Sketch({{3, 1}, {8, 2}}, 7);
  MergeSketch(Sketch({{2, 5}, {8, 4}}, 8), &sketch);
  EXPECT_EQ(sketch.max(), 8);
  ASSERT_EQ(sketch.buckets_size(), 3);
  EXPECT_EQ(sketch.buckets(0).upper(), 2);
  EXPECT_EQ(sketch.buckets(2).upper(), 8);
  EXPECT_EQ(sketch.buckets(2).count(), 6);
}

TEST(LimitsTest, SuggestionsAreMultiplesOfEight) {
  EXPECT_EQ(SuggestedLimit(0, 1.2), 0);
  EXPECT_EQ(SuggestedLimit(1, 1), 8);
  EXPECT_EQ(SuggestedLimit(8, 1), 8);
  EXPECT_EQ(SuggestedLimit(8, 1.01), 16);
  EXPECT_EQ(SuggestedLimit(100, 1.2), 120);
  EXPECT_EQ(SuggestedLimit(80, 1.1), 88);
  EXPECT_EQ(SuggestedLimit(int64_t{1} << 40, 1e6), 2147483640);
}

TEST(LimitsTest, AllTablesOfAStackGetItsLimits) {
  v1::DescribeModelResponse model;
  for (const char* name : {"a", "b", "unused"}) {
    v1::TableConfig* table = model.mutable_config()->add_tables();
    table->set_name(name);
    table->set_max_ids_per_partition(5);
  }
  v1::StackPlan* stack = model.mutable_plan()->add_stacks();
  stack->set_name("a_b");
  stack->add_tables()->set_name("a");
  stack->add_tables()->set_name("b");
  stack = model.mutable_plan()->add_stacks();
  stack->set_name("unused");
  stack->add_tables()->set_name("unused");
  v1::GetLimitsResponse limits;
  limits.add_stacks()->set_stack("a_b");
  *limits.mutable_stacks(0)->mutable_ids() = Sketch({{20, 1}}, 20);
  *limits.mutable_stacks(0)->mutable_unique_ids() = Sketch({{10, 1}}, 10);
  *limits.mutable_stacks(0)->mutable_ids_per_sample() = Sketch({{70, 1}}, 70);
  *limits.mutable_stacks(0)->mutable_minibatches() = Sketch({{50, 1}}, 50);
  limits.add_stacks()->set_stack("unused");
  const v1::ModelConfig config = WithSuggestedLimits(model, limits, 1.5);
  for (int t : {0, 1}) {
    EXPECT_EQ(config.tables(t).max_ids_per_partition(), 32);
    EXPECT_EQ(config.tables(t).max_unique_ids_per_partition(), 16);
  }
  EXPECT_EQ(config.tables(2).max_ids_per_partition(), 5);
  EXPECT_EQ(config.tables(2).max_unique_ids_per_partition(), 0);
  // A plan without a capacity gets none.
  EXPECT_FALSE(config.plan().has_max_ids_per_chip_per_sample());
  EXPECT_FALSE(config.plan().has_max_minibatches_per_sparsecore());
  limits.mutable_stacks(0)->set_max_ids_per_chip_per_sample(64);
  limits.mutable_stacks(0)->set_max_minibatches_per_sparsecore(40);
  const v1::PlanConfig plan = WithSuggestedLimits(model, limits, 1.5).plan();
  EXPECT_EQ(plan.max_ids_per_chip_per_sample(), 112);
  EXPECT_EQ(plan.max_minibatches_per_sparsecore(), 64);  // there are no more
  // The capacity is that of all stacks, and of this one nothing is known.
  limits.mutable_stacks(1)->set_max_ids_per_chip_per_sample(256);
  EXPECT_EQ(WithSuggestedLimits(model, limits, 1.5).plan().max_ids_per_chip_per_sample(), 256);
}

}  // namespace suggested_limits_test
}  // namespace emberd::emberctl
