// Against exact counts. Prevents: a heap that loses the smallest counter, so that a frequent key is
// thrown out; counts below the truth, or above it by more than the error that is admitted.
#include "shard/batch/space_saving.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include <gtest/gtest.h>

#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace {

// Keys 0, 1, ... with probability in proportion to 1 / (1 + key)^exponent.
std::vector<uint32_t> ZipfKeys(int keys, double exponent, int count, std::mt19937_64& random) {
  std::vector<double> weights;
  for (int key = 0; key < keys; ++key) weights.push_back(std::pow(1 + key, -exponent));
  std::discrete_distribution<uint32_t> distribution(weights.begin(), weights.end());
  std::vector<uint32_t> drawn(count);
  for (uint32_t& key : drawn) key = distribution(random);
  return drawn;
}

struct Stream {
  int counters, keys;
  double exponent;
};

class SpaceSavingTest : public ::testing::TestWithParam<Stream> {};

TEST_P(SpaceSavingTest, CountsAreTooHighByAtMostTheirError) {
  const Stream stream = GetParam();
  std::mt19937_64 random(testing::TestSeed());
  SpaceSaving sketch(stream.counters);
  std::map<uint32_t, int64_t> exact;
  int64_t total = 0;
  for (const uint32_t key : ZipfKeys(stream.keys, stream.exponent, 50'000, random)) {
    const int64_t weight = 1 + static_cast<int64_t>(random() % 7);
    sketch.Add(key, weight);
    exact[key] += weight;
    total += weight;
  }
  EXPECT_EQ(sketch.total(), total);
  const std::vector<SpaceSaving::Item> items = sketch.Top(stream.counters);
  EXPECT_EQ(items.size(), std::min<size_t>(stream.counters, exact.size()));
  int64_t sum = 0;
  std::map<uint32_t, int64_t> found;
  for (const SpaceSaving::Item& item : items) {
    EXPECT_LE(exact[item.key], item.count) << "key " << item.key;
    EXPECT_GE(exact[item.key], item.count - item.error) << "key " << item.key;
    EXPECT_LE(item.error, total / stream.counters);
    if (!found.empty()) {
      EXPECT_LE(item.count, sum) << "largest counts first";
    }
    EXPECT_TRUE(found.emplace(item.key, item.count).second) << "key " << item.key << " twice";
    sum = item.count;
  }
  for (const auto& [key, count] : exact) {
    if (count > total / stream.counters) {
      EXPECT_EQ(found.count(key), 1u) << "key " << key << " of " << count;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Streams, SpaceSavingTest,
                         ::testing::Values(Stream{1, 10, 1}, Stream{7, 1000, 0},
                                           Stream{100, 20'000, 1.05}, Stream{1024, 20'000, 0.8},
                                           Stream{1024, 500, 1.2}));

TEST(SpaceSaving, IsExactAsLongAsAllKeysHaveACounter) {
  std::mt19937_64 random(testing::TestSeed());
  SpaceSaving sketch(300);
  std::map<uint32_t, int64_t> exact;
  for (const uint32_t key : ZipfKeys(300, 1.05, 20'000, random)) {
    sketch.Add(key, 1);
    ++exact[key];
  }
  for (const SpaceSaving::Item& item : sketch.Top(300)) {
    EXPECT_EQ(item.count, exact[item.key]);
    EXPECT_EQ(item.error, 0);
  }
}

TEST(SpaceSaving, TheHottestKeysOfAZipfStreamComeFirst) {
  std::mt19937_64 random(testing::TestSeed());
  SpaceSaving sketch(1024);
  for (const uint32_t key : ZipfKeys(100'000, 1.2, 200'000, random)) sketch.Add(key, 1);
  const std::vector<SpaceSaving::Item> top = sketch.Top(5);
  ASSERT_EQ(top.size(), 5u);
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(top[i].key, i);  // the next ones are close together
}

TEST(SpaceSaving, TopOfNothingIsNothing) {
  SpaceSaving sketch(3);
  EXPECT_TRUE(sketch.Top(10).empty());
  sketch.Add(9, 1);
  EXPECT_TRUE(sketch.Top(0).empty());
  EXPECT_TRUE(sketch.Top(-1).empty());
  EXPECT_EQ(sketch.Top(10).size(), 1u);
}

}  // namespace
}  // namespace emberd::shard
