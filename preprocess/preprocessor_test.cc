// Would catch: an id lost, doubled, moved to another row or sample, or given another gain on its
// way through extraction, sort, merge and partitioning, for any form of input, stacking, layout and
// topology.
#include "preprocess/preprocessor.h"

#include <gtest/gtest.h>

#include "preprocess/random_case.h"

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

TEST(PreprocessorTest, RandomBatchesHoldWhatAMapHolds) {
  const uint64_t seed = TestSeed();
  for (int n = 0; n < TestCases(3000); ++n) {
    SCOPED_TRACE(n);
    Random random(seed * 1000003 + n);
    const RandomCase c = MakeRandomCase(random, /*limits=*/false);
    const auto plan = MakePlan(c.model, c.topology);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto preprocessor = Preprocessor::Create(&c.model, &*plan, {});
    ASSERT_TRUE(preprocessor.ok()) << preprocessor.status();
    const auto batch = (*preprocessor)->Run(c.inputs());
    ASSERT_TRUE(batch.ok()) << batch.status();
    ExpectSameEntries(NaiveEntries(c, *plan), EntriesOf(**batch, *plan));
    if (testing::Test::HasFatalFailure()) {
      ADD_FAILURE() << c.model.DebugString();
      return;
    }
  }
}

}  // namespace
}  // namespace emberd::preprocess
