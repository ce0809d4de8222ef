// Would catch: a cost that does not follow from the buffers, for any model, batch and topology.
#include "preprocess/batch_cost.h"

#include <map>
#include <set>

#include <gtest/gtest.h>

#include "preprocess/random_case.h"

namespace emberd::preprocess {
namespace {

struct NaiveStack {
  int64_t ids = 0;
  std::map<int, int64_t> ids_of_partition;
  std::set<std::pair<int, int>> rows;
};

void ExpectCostOf(const NaiveStack& naive, const StackCost& cost) {
  EXPECT_EQ(cost.ids, naive.ids);
  EXPECT_EQ(cost.rows_touched, static_cast<int64_t>(naive.rows.size()));
  EXPECT_EQ(cost.buffer_cells - cost.pad_cells, naive.ids);
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
  EXPECT_DOUBLE_EQ(cost.imbalance,
                   static_cast<double>(fullest * cost.partition_ids.size()) / naive.ids);
}

TEST(BatchCostTest, FollowsFromTheEntries) {
  Random random(TestSeed());
  int ran = 0;
  for (int n = 0; n < TestCases(300); ++n) {
    SCOPED_TRACE(testing::Message() << "case " << n);
    const RandomCase c = MakeRandomCase(random, /*limits=*/n % 2 == 1);
    const absl::StatusOr<Plan> plan = MakePlan(c.model, c.topology);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto preprocessor = Preprocessor::Create(&c.model, &*plan, {});
    ASSERT_TRUE(preprocessor.ok());
    const auto batch = (*preprocessor)->Run(c.inputs());
    if (!batch.ok() || c.model.plan().allow_id_dropping()) continue;
    ++ran;
    std::vector<NaiveStack> naive(plan->stacks.size());
    for (const auto& [key, entry] : NaiveEntries(c, *plan)) {
      const auto [stack, sample, partition, row] = key;
      ++naive[stack].ids;
      ++naive[stack].ids_of_partition[partition];
      naive[stack].rows.insert({partition, row});
    }
    const std::vector<StackCost> costs = BatchCost(c.model, *plan, **batch);
    ASSERT_EQ(costs.size(), naive.size());
    for (size_t k = 0; k < costs.size(); ++k) {
      ExpectCostOf(naive[k], costs[k]);
      const StackPlan& stack = plan->stacks[k];
      EXPECT_EQ(costs[k].bytes_gathered, naive[k].ids * stack.embedding_dim * 4);
      EXPECT_GE(costs[k].activation_bytes_per_sparsecore * c.topology.sparsecores_per_shard,
                costs[k].samples * stack.embedding_dim * 4);
    }
  }
  EXPECT_GT(ran, 0);
}

}  // namespace
}  // namespace emberd::preprocess
