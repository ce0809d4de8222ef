// Covers: highway_buckets_avx2.cc
#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "base/testing/seed.h"
#include "preprocess/batch/cuts.h"
#include "preprocess/batch/highway_buckets.h"
#include "preprocess/testing/numberings.h"
#include "tests/testing/random_case.h"

namespace emberd::preprocess {
namespace buckets_test {

// Would catch: machines with and without AVX2 that cut the vocabulary at different places.
TEST(BucketsTest, EveryMachineFindsTheSameBuckets) {
  Random random(TestSeed(1));
  std::vector<int32_t> rows(1000);
  for (int32_t& row : rows) row = static_cast<int32_t>(random() % (1 << 27));
  const auto n = static_cast<int64_t>(rows.size());
  std::vector<uint8_t> portable(rows.size()), avx2(rows.size());
  for (int bits : {0, 2, 4}) {
    const uint32_t partition = (1u << bits) - 1;
    HighwayBucketsPortable(bits, partition, rows.data(), n, portable.data());
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(portable[i],
                HashStackedId(rows[i] << bits | static_cast<int32_t>(partition)) % kBuckets);
    }
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2")) continue;
    HighwayBucketsAvx2(bits, partition, rows.data(), n, avx2.data());
    EXPECT_EQ(avx2, portable);
#endif
  }
}

TEST(BucketsTest, RulesByName) {
  StackShape shape;
  shape.partitions = 4;
  shape.rows_per_partition = 40;  // 160 stacked ids, 3 a bucket
  const std::vector<int32_t> rows = {0, 1, 5, 31, 39};
  std::vector<uint8_t> buckets(rows.size());
  const auto run = [&](v1::BucketHash hash) {
    BucketsOf(MakeBucketRule(hash, shape), 2, rows.data(), static_cast<int64_t>(rows.size()),
              buckets.data());
    return std::vector<int>(buckets.begin(), buckets.end());
  };
  EXPECT_EQ(run(v1::ID_RANGE), (std::vector<int>{0, 2, 7, 42, 52}));    // (4 row + 2) / 3
  EXPECT_EQ(run(v1::ID_MODULO), (std::vector<int>{2, 6, 22, 62, 30}));  // (4 row + 2) mod 64
  EXPECT_EQ(run(v1::LOCAL_ROW_MODULO), (std::vector<int>{0, 1, 5, 31, 39}));
  EXPECT_EQ(run(v1::HIGHWAY_HASH)[0], static_cast<int>(HashStackedId(2) % kBuckets));
  EXPECT_EQ(run(v1::HIGHWAY_HASH)[3], static_cast<int>(HashStackedId(126) % kBuckets));
}

// Would catch: a memo that gives a row the bucket of its neighbour, where rows repeat, where a
// block of them ends, or where only some of them are known.
TEST(BucketsTest, AMemoFindsWhatTheRuleSays) {
  Random random(TestSeed(2));
  StackShape shape;
  shape.partitions = 4;
  shape.rows_per_partition = 2000;
  std::vector<int32_t> rows(1500);
  for (int32_t& row : rows) row = static_cast<int32_t>(random() % 2000);
  std::sort(rows.begin(), rows.end());
  const auto n = static_cast<int64_t>(rows.size());
  std::vector<uint8_t> expected(rows.size()), found(rows.size());
  for (const v1::BucketHash hash : {v1::HIGHWAY_HASH, v1::ID_MODULO}) {
    const BucketRule rule = MakeBucketRule(hash, shape);
    std::vector<uint8_t> memory(BucketMemo::BytesFor(rule, shape));
    BucketsOf(rule, 3, rows.data(), n, expected.data());
    const BucketMemo remembers(rule, shape, memory.empty() ? nullptr : memory.data());
    const BucketMemo forgets(rule, shape, /*memory=*/nullptr);
    const std::vector<int32_t> some(rows.begin(), rows.begin() + 400);
    remembers.Find(3, some.data(), 400, found.data());
    for (const BucketMemo& memo : {remembers, remembers, forgets}) {
      memo.Find(3, rows.data(), n, found.data());
      EXPECT_EQ(found, expected);
    }
  }
}

}  // namespace buckets_test
}  // namespace emberd::preprocess
