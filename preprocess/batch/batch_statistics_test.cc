// Would catch: a cost that does not follow from the buffers, for any model, batch and topology.
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "base/testing/seed.h"
#include "config/config.h"
#include "preprocess/batch/chip_cost.h"
#include "preprocess/batch/preprocessor.h"
#include "tests/testing/random_case.h"

namespace emberd::preprocess {
namespace batch_statistics_test {

struct NaiveStack {
  int64_t ids = 0;
  std::map<int, int64_t> ids_of_partition;
  std::set<std::pair<int, int>> rows;
};

void ExpectCostOf(const NaiveStack& naive, const StackCost& cost) {
  EXPECT_EQ(cost.statistics.ids(), naive.ids);
  EXPECT_EQ(cost.rows_touched, static_cast<int64_t>(naive.rows.size()));
  EXPECT_EQ(cost.statistics.required_buffer_size() - cost.statistics.pad_cells(), naive.ids);
  int64_t fullest = 0, in_minibatches = 0, in_pairs = 0;
  for (size_t p = 0; p < cost.partition_ids.size(); ++p) {
    const auto found = naive.ids_of_partition.find(static_cast<int>(p));
    const int64_t ids = found == naive.ids_of_partition.end() ? 0 : found->second;
    EXPECT_EQ(cost.partition_ids[p], ids);
    fullest = std::max(fullest, ids);
  }
  for (const MinibatchCost& minibatch : cost.minibatches) {
    EXPECT_LE(minibatch.max_unique_ids, minibatch.max_ids);
    in_minibatches += minibatch.ids;
  }
  for (const PairCost& pair : cost.pairs) in_pairs += pair.ids;
  EXPECT_EQ(in_minibatches, naive.ids);
  EXPECT_EQ(in_pairs, naive.ids);
  if (naive.ids == 0) return;
  EXPECT_DOUBLE_EQ(cost.statistics.imbalance(),
                   static_cast<double>(fullest * cost.partition_ids.size()) / naive.ids);
}

TEST(BatchCostTest, FollowsFromTheEntries) {
  Random random(TestSeed(1));
  int ran = 0;
  for (int n = 0; n < TestCases(300); ++n) {
    SCOPED_TRACE(testing::Message() << "case " << n);
    const RandomCase c = MakeRandomCase(random, /*limits=*/n % 2 == 1);
    const absl::StatusOr<Plan> plan = MakePlan(c.model, c.topology);
    ASSERT_TRUE(plan.ok()) << plan.status();
    Preprocessor preprocessor(&c.model, &*plan, nullptr);
    const auto batch = preprocessor.Run(c.inputs());
    if (!batch.ok() || c.model.plan().allow_id_dropping()) continue;
    ++ran;
    std::vector<NaiveStack> naive(plan->stacks.size());
    for (const auto& [key, entry] : NaiveEntries(c, *plan)) {
      const auto [stack, sample, partition, row] = key;
      ++naive[stack].ids;
      ++naive[stack].ids_of_partition[partition];
      naive[stack].rows.insert({partition, row});
    }
    const std::vector<StackCost> costs = BatchCost(*plan, **batch);
    ASSERT_EQ(costs.size(), naive.size());
    for (size_t k = 0; k < costs.size(); ++k) {
      ExpectCostOf(naive[k], costs[k]);
      const StackPlan& stack = plan->stacks[k];
      EXPECT_EQ(costs[k].statistics.bytes_gathered(), naive[k].ids * stack.embedding_dim * 4);
      EXPECT_GE(
          costs[k].statistics.activation_bytes_per_sparsecore() * c.topology.sparsecores_per_shard,
          costs[k].samples * stack.embedding_dim * 4);
    }
  }
  EXPECT_GT(ran, 0);
}

// The statistics count without reading entries; reading them must agree, also where ids were
// dropped or the batch was cut.
TEST(BatchCostTest, StatisticsAgreeWithTheEntries) {
  Random random(TestSeed(1));
  int dropped = 0, cut = 0;
  for (int n = 0; n < TestCases(300); ++n) {
    SCOPED_TRACE(testing::Message() << "case " << n);
    RandomCase c = MakeRandomCase(random, /*limits=*/true);
    c.model.mutable_plan()->set_allow_id_dropping(n % 2 == 0);
    const Plan plan = *MakePlan(c.model, c.topology);
    const auto preprocessor = std::make_unique<Preprocessor>(&c.model, &plan, nullptr);
    const auto batch = preprocessor->Run(c.inputs());
    if (!batch.ok()) continue;
    const std::vector<StackCost> costs = BatchCost(plan, **batch);
    for (size_t k = 0; k < costs.size(); ++k) {
      const v1::StackStatistics& statistics = (*batch)->statistics().stacks(static_cast<int>(k));
      int64_t entries = 0;
      for (const MinibatchCost& minibatch : costs[k].minibatches) entries += minibatch.ids;
      EXPECT_EQ(statistics.pad_cells(), statistics.required_buffer_size() - entries);
      EXPECT_EQ(statistics.bytes_gathered(), entries * plan.stacks[k].embedding_dim * 4);
      EXPECT_EQ(statistics.limit_ids_per_partition(), plan.stacks[k].limits.ids);
      EXPECT_EQ(statistics.limit_unique_ids_per_partition(), plan.stacks[k].limits.unique);
      dropped += statistics.dropped_ids() > 0;
      cut += costs[k].minibatches.size() > 1;
    }
  }
  EXPECT_GT(dropped, 0);
  EXPECT_GT(cut, 0);
}

// By hand: two SparseCores, one shard, a table of 6 columns (padded to 8) as bfloat16. Samples 0 to
// 3 go to slot 0, 4 to 6 to slot 1. Even ids lie in one partition, odd ones in the other.
TEST(BatchCostTest, OfASmallBatchByHand) {
  const v1::ModelConfig model = *config::ParseModel(R"(
    name: "m" features { name: "f" table: "t" }
    tables { name: "t" vocabulary_size: 100 embedding_dim: 6 storage_dtype: BFLOAT16
             max_ids_per_partition: 50 max_unique_ids_per_partition: 40 })");
  const Plan plan = *MakePlan(model, {.shards = 1, .sparsecores_per_shard = 2});
  const auto preprocessor = std::make_unique<Preprocessor>(&model, &plan, nullptr);
  // Two ids per sample; sample 1 repeats its id, which merges.
  const std::vector<int64_t> ids = {0, 2, 4, 4, 6, 8, 10, 12, 14, 16, 18, 20, 0, 1};
  FeatureInput input;
  input.ids = DenseInput{absl::MakeConstSpan(ids), 2, 7};
  const auto batch = preprocessor->Run({input});
  ASSERT_TRUE(batch.ok()) << batch.status();
  const v1::StackStatistics& statistics = (*batch)->statistics().stacks(0);
  EXPECT_EQ(statistics.ids(), 13);
  EXPECT_EQ(statistics.duplicate_ids(), 1);
  EXPECT_EQ(statistics.max_ids_per_partition(), 7);         // the even ids of slot 0
  EXPECT_EQ(statistics.max_unique_ids_per_partition(), 7);  // all of them distinct
  EXPECT_EQ(statistics.limit_ids_per_partition(), 50);
  EXPECT_EQ(statistics.limit_unique_ids_per_partition(), 40);
  // Slot 0: 7 ids in 8 cells; slot 1: 5 in 8 and 1 in 8.
  EXPECT_EQ(statistics.required_buffer_size(), 24);
  EXPECT_EQ(statistics.pad_cells(), 11);
  EXPECT_EQ(statistics.bytes_gathered(), 13 * 8 * 2);
  EXPECT_EQ(statistics.activation_bytes_per_sparsecore(), 4 * 8 * 4);
  EXPECT_DOUBLE_EQ(statistics.imbalance(), 12 / 6.5);
}

}  // namespace batch_statistics_test
}  // namespace emberd::preprocess
