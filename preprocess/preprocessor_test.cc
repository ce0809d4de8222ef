// Would catch: an id lost, doubled, moved to another row or sample, or given another gain on its
// way through extraction, sort, merge and partitioning, for any form of input, stacking, layout and
// topology.
#include "preprocess/preprocessor.h"

#include <functional>
#include <map>
#include <set>
#include <tuple>

#include <gtest/gtest.h>

#include "preprocess/random_case.h"
#include "preprocess/splits.h"

namespace emberd::preprocess {
namespace {

void ExpectSameEntries(const EntryMap& expected, const EntryMap& got) {
  ASSERT_EQ(expected.size(), got.size());
  auto it = got.begin();
  for (const auto& [key, entry] : expected) {
    ASSERT_EQ(key, it->first);
    ASSERT_EQ(entry.count, it->second.count);
    ASSERT_FLOAT_EQ(entry.gain, it->second.gain);
    ++it;
  }
}

// Every mini-batch respects the limits of its stack, and a row lies in one mini-batch alone.
void ExpectWithinLimits(const PreprocessedBatch& batch, const Plan& plan) {
  const int slots = plan.topology.sparsecores_per_shard;
  std::map<std::tuple<int, int, int32_t>, int64_t> minibatch_of_row;  // (stack, partition, row)
  for (int shard = 0; shard < plan.topology.shards; ++shard) {
    for (const StackBatchView& view : batch.ShardView(shard)) {
      const StackPlan& stack = plan.stacks[view.stack];
      const PartitionLimits limits = {stack.max_ids_per_partition,
                                      stack.max_unique_ids_per_partition};
      ASSERT_EQ(view.minibatches, batch.statistics().num_minibatches());
      for (size_t n = 0; n < view.segments.size(); ++n) {
        const CsrSegmentView& segment = view.segments[n];
        for (int k = 0; k < slots; ++k) {
          const int64_t begin = k == 0 ? segment.base : AlignCsr(segment.row_ends[k - 1]);
          std::set<int32_t> rows;
          for (int64_t i = begin; i < segment.row_ends[k]; ++i) {
            const int32_t row = segment.embedding_ids[i - segment.base];
            rows.insert(row);
            const auto minibatch = static_cast<int64_t>(n) % view.minibatches;
            const auto place =
                minibatch_of_row.insert({{view.stack, shard * slots + k, row}, minibatch});
            ASSERT_EQ(place.first->second, minibatch);
          }
          ASSERT_FALSE(
              limits.Exceeded(segment.row_ends[k] - begin, static_cast<int64_t>(rows.size())));
        }
      }
    }
  }
}

// Runs random cases and hands what comes out to `check`.
void ForRandomCases(bool limits, int count,
                    const std::function<void(RandomCase&, const Plan&, Preprocessor&)>& check) {
  const uint64_t seed = TestSeed();
  for (int n = 0; n < TestCases(count); ++n) {
    SCOPED_TRACE(testing::Message() << "case " << n);
    Random random(seed * 1000003 + n);
    RandomCase c = MakeRandomCase(random, limits);
    const auto plan = MakePlan(c.model, c.topology);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto preprocessor = Preprocessor::Create(&c.model, &*plan, {});
    ASSERT_TRUE(preprocessor.ok()) << preprocessor.status();
    check(c, *plan, **preprocessor);
    if (testing::Test::HasFatalFailure()) {
      ADD_FAILURE() << c.model.DebugString();
      return;
    }
  }
}

TEST(PreprocessorTest, RandomBatchesHoldWhatAMapHolds) {
  ForRandomCases(/*limits=*/false, 2000, [](RandomCase& c, const Plan& plan, Preprocessor& pre) {
    const auto batch = pre.Run(c.inputs());
    ASSERT_TRUE(batch.ok()) << batch.status();
    EXPECT_EQ((*batch)->statistics().num_minibatches(), 1);
    ExpectSameEntries(NaiveEntries(c, plan), EntriesOf(**batch, plan));
  });
}

TEST(PreprocessorTest, RandomBatchesUnderLimitsLoseNothingAndKeepTheLimits) {
  int cut = 0, refused = 0, plain = 0;
  ForRandomCases(/*limits=*/true, 2000, [&](RandomCase& c, const Plan& plan, Preprocessor& pre) {
    const auto batch = pre.Run(c.inputs());
    if (!batch.ok()) {
      ++refused;
      ASSERT_EQ(batch.status().code(), absl::StatusCode::kResourceExhausted) << batch.status();
      return;
    }
    ++((*batch)->statistics().num_minibatches() > 1 ? cut : plain);
    ExpectWithinLimits(**batch, plan);
    ExpectSameEntries(NaiveEntries(c, plan), EntriesOf(**batch, plan));
  });
  std::cout << "plain " << plain << ", cut " << cut << ", refused " << refused << std::endl;
  EXPECT_GT(cut, plain / 10);
}

// Would catch: dropping more than the limits ask for, dropping in silence, or keeping what is over
// the limits.
TEST(PreprocessorTest, DroppingKeepsTheLimitsAndCountsWhatItDrops) {
  int dropping = 0;
  ForRandomCases(/*limits=*/true, 2000, [&](RandomCase& c, const Plan& plan, Preprocessor& pre) {
    const bool fits = pre.Run(c.inputs()).ok();
    c.model.mutable_plan()->set_allow_id_dropping(true);
    const auto dropper = Preprocessor::Create(&c.model, &plan, {});
    const auto batch = (*dropper)->Run(c.inputs());
    ASSERT_TRUE(batch.ok()) << batch.status();
    ExpectWithinLimits(**batch, plan);
    int64_t dropped = 0, entries = 0, expected = 0;
    for (const auto& stack : (*batch)->statistics().stacks()) dropped += stack.dropped_ids();
    for (const auto& [key, entry] : EntriesOf(**batch, plan)) entries += entry.count;
    for (const auto& [key, entry] : NaiveEntries(c, plan)) expected += entry.count;
    dropping += dropped > 0;
    ASSERT_EQ(fits, dropped == 0);
    // A dropped entry counts once for every occurrence that merged into it.
    ASSERT_LE(expected - entries, dropped);
    ASSERT_EQ(entries == expected, dropped == 0);
  });
  EXPECT_GT(dropping, 0);
}

// Would catch: a step of the two-phase API that differs from Run, or cuts of others that change the
// content.
TEST(PreprocessorTest, CutsOfOtherReplicasOnlyCutFiner) {
  ForRandomCases(/*limits=*/true, 1000, [](RandomCase& c, const Plan& plan, Preprocessor& pre) {
    auto sorted = pre.Sort(c.inputs());
    ASSERT_TRUE(sorted.ok()) << sorted.status();
    const auto own = pre.FindCuts(sorted->get());
    if (!own.ok()) return;
    ASSERT_EQ((*sorted)->needs_minibatches(), *own != 0);
    const uint64_t cuts = *own | 0x8000000100000100u;
    const auto batch = pre.Finish(*std::move(sorted), cuts);
    ASSERT_TRUE(batch.ok()) << batch.status();
    ASSERT_EQ((*batch)->statistics().num_minibatches(), MinibatchCount(cuts));
    ExpectWithinLimits(**batch, plan);
    ExpectSameEntries(NaiveEntries(c, plan), EntriesOf(**batch, plan));
  });
}

}  // namespace
}  // namespace emberd::preprocess
