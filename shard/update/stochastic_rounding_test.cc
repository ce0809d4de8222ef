// Random rounding of 16-bit weights. Prevents: a bias, which would add up over many steps; bits
// that repeat over rows, columns or steps; bits that depend on the number of shards; changes below
// half of the last bit that get lost.
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "base/floats.h"
#include "shard/store/portable_numbers.h"
#include "shard/testing/optimizer_cases.h"
#include "shard/testing/random_rounding.h"
#include "shard/testing/reference.h"
#include "shard/testing/test_engine.h"

namespace emberd::shard {
namespace stochastic_rounding_test {

using testing::Row;
using testing::TestBatch;
using testing::TestEngine;
using testing::TestEntry;
using testing::TestShape;

// Mean of the rounded value over all 2^16 random numbers; checks that only the two neighbours
// occur.
template <class Round, class Widen>
double MeanOfRoundings(float x, const Round& round, const Widen& widen) {
  double sum = 0, low = INFINITY, high = -INFINITY;
  for (uint32_t random = 0; random < 0x10000; ++random) {
    const double value = widen(round(x, static_cast<uint16_t>(random)));
    sum += value;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  EXPECT_LE(low, x);
  EXPECT_GE(high, x);
  return sum / 0x10000;
}

TEST(StochasticRounding, Bfloat16HasTheExactMean) {
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (!(std::abs(x) < 1e38f)) continue;
    EXPECT_EQ(MeanOfRoundings(x, ToBfloat16Randomly, FromBfloat16), x);
  }
}

TEST(StochasticRounding, Float16HasTheMean) {
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    // From 2^-25, half of the smallest number, to 2^16.
    const uint32_t exponent = 102 + random() % 41;
    const float x =
        std::bit_cast<float>(static_cast<uint32_t>(random() & 0x807fffff) | exponent << 23);
    if (std::abs(x) > 65504) continue;
    const double mean = MeanOfRoundings(x, ToFloat16Randomly, FromFloat16);
    if (std::abs(x) >= 0x1p-14f) {
      EXPECT_EQ(mean, x);
    } else {
      EXPECT_NEAR(mean, x, 0x1p-24 * 0x1p-17) << x;
    }
  }
}

TEST(StochasticRounding, KeepsWhatFitsAndWhatIsSpecial) {
  for (const uint16_t random : {uint16_t{0}, uint16_t{0x8000}, uint16_t{0xffff}}) {
    for (const float x : {0.0f, -0.0f, 1.0f, -1.5f, 0x1p-24f, 65504.0f}) {
      EXPECT_EQ(FromFloat16(ToFloat16Randomly(x, random)), x);
      EXPECT_EQ(std::signbit(FromFloat16(ToFloat16Randomly(x, random))), std::signbit(x));
    }
    EXPECT_EQ(FromBfloat16(ToBfloat16Randomly(-1.5f, random)), -1.5f);
    EXPECT_EQ(FromFloat16(ToFloat16Randomly(65519, random)), 65504);
    EXPECT_EQ(FromFloat16(ToFloat16Randomly(-INFINITY, random)), -65504);
    EXPECT_EQ(FromBfloat16(ToBfloat16Randomly(INFINITY, random)), INFINITY);
    EXPECT_TRUE(
        std::isfinite(FromBfloat16(ToBfloat16Randomly(std::numeric_limits<float>::max(), random))));
    EXPECT_TRUE(std::isnan(FromFloat16(ToFloat16Randomly(NAN, random))));
    EXPECT_TRUE(std::isnan(FromBfloat16(ToBfloat16Randomly(NAN, random))));
  }
}

// Each bit is set half of the time, and equal to its neighbour's half of the time, over columns,
// rows and steps. 5 standard deviations, for fixed keys.
TEST(StochasticRounding, RandomBitsAreBalancedAndIndependent) {
  constexpr int kColumns = 64, kRows = 64, kSteps = 16;
  std::vector<uint16_t> bits(kSteps * kRows * kColumns);
  for (int step = 0; step < kSteps; ++step) {
    for (int row = 0; row < kRows; ++row) {
      RandomHalves(SubKey(SubKey(NamedKey(1, "stack"), step), row), kColumns,
                   &bits[(step * kRows + row) * kColumns]);
    }
  }
  const int n = static_cast<int>(bits.size());
  for (int bit = 0; bit < 16; ++bit) {
    int set = 0;
    for (const uint16_t b : bits) set += b >> bit & 1;
    EXPECT_NEAR(set, n / 2, 2.5 * std::sqrt(n)) << bit;
    for (const int distance : {1, 4, kColumns, kRows * kColumns}) {
      int equal = 0;
      for (int i = distance; i < n; ++i) equal += !((bits[i] ^ bits[i - distance]) >> bit & 1);
      EXPECT_NEAR(equal, (n - distance) / 2, 2.5 * std::sqrt(n)) << bit << " " << distance;
    }
  }
}

constexpr int kWidth = 32;

StackSpec Stack(v1::DataType dtype, const TestShape& shape, bool stochastic) {
  StackSpec stack = testing::OneTableStack(shape, kWidth, kWidth,
                                           testing::CompleteOptimizer("sgd {} learning_rate: 1"));
  stack.storage_dtype = dtype;
  stack.stochastic_rounding = stochastic;
  stack.tables[0].initializer.mutable_constant()->set_value(1);
  return stack;
}

// Adds `change` to every weight of every row; `step` -1: not given.
void Train(TestEngine& engine, const TestShape& shape, int first, int count, float change,
           int64_t step, uint64_t rng_seed = 0) {
  std::vector<TestEntry> entries;
  for (int sample = 0; sample < shape.samples; ++sample) {
    for (int p = 0; p < shape.partitions; ++p) entries.push_back({sample, p, sample, 1.0f});
  }
  TestBatch batch(entries, shape, first, count, 1, 1);
  const std::vector<float> gradients(shape.samples * kWidth, -change);
  ApplyInput input;
  input.step = step;
  input.rng_seed = rng_seed;
  input.stacks.push_back({0, gradients, {}});
  engine.Apply(*engine.Prepare(batch.view()), input);
}

// A step without a number takes the next place in the order of updates. One that is skipped must
// not, or a group that skips would round otherwise than one that never had the step.
TEST(StochasticRounding, ASkippedStepLeavesNoTrace) {
  const TestShape shape{2, 32, 32};
  const auto weights = [&](bool skips) {
    TestEngine engine({Stack(v1::BFLOAT16, shape, true)}, shape, 0, 2);
    Train(engine, shape, 0, 2, 0x1p-10f, -1);
    TestBatch batch({{0, 0, 0, 1.0f}}, shape, 0, 2, 1, 1);
    ApplyInput skip;
    skip.skip = true;
    if (skips) {
      EXPECT_EQ(engine.Apply(*engine.Prepare(batch.view()), skip), 0);
    }
    Train(engine, shape, 0, 2, 0x1p-10f, -1);
    std::vector<float> values;
    for (int row = 0; row < 32; ++row) {
      for (const float x : engine.ReadRow(0, 0, row, kWidth)) values.push_back(x);
    }
    return values;
  };
  EXPECT_EQ(weights(true), weights(false));
}

// Steps of 1/32 of the distance between neighbours: nearest never moves, random rounding drifts as
// float32 would. The tolerance is 5 standard deviations of the mean.
TEST(StochasticRounding, SmallChangesAddUp) {
  const TestShape shape{2, 32, 32};
  constexpr int kSteps = 200;
  for (const auto& [dtype, last_bit] :
       {std::pair(v1::BFLOAT16, 0x1p-7f), std::pair(v1::FLOAT16, 0x1p-10f)}) {
    TestEngine nearest({Stack(dtype, shape, false)}, shape, 0, 2);
    TestEngine stochastic({Stack(dtype, shape, true)}, shape, 0, 2);
    for (int step = 0; step < kSteps; ++step) {
      Train(nearest, shape, 0, 2, last_bit / 32, step);
      Train(stochastic, shape, 0, 2, last_bit / 32, step);
    }
    double sum = 0;
    for (int p = 0; p < 2; ++p) {
      for (int row = 0; row < 32; ++row) {
        for (const float x : stochastic.ReadRow(0, p, row, kWidth)) sum += x;
        EXPECT_EQ(nearest.ReadRow(0, p, row, kWidth), Row(kWidth, 1.0f));
      }
    }
    constexpr double kValues = 2 * 32 * kWidth;
    const double deviation = last_bit * std::sqrt(kSteps * (31.0 / 32 / 32) / kValues);
    EXPECT_NEAR(sum / kValues, 1 + kSteps * last_bit / 32, 5 * deviation);
  }
}

// Neither the shards that rows are dealt to nor the way in which steps are counted may show; a step
// that touches a shard only elsewhere counts there, too.
TEST(StochasticRounding, BitsDoNotDependOnTheShards) {
  const TestShape shape{4, 16, 16};
  for (const bool numbered : {false, true}) {
    TestEngine whole({Stack(v1::BFLOAT16, shape, true)}, shape, 0, 4);
    TestEngine half({Stack(v1::BFLOAT16, shape, true)}, shape, 2, 2);
    for (int step = 0; step < 8; ++step) {
      TestBatch elsewhere({{0, 0, 3, 1.0f}}, shape, 0, 4, 1, 1);
      TestBatch nothing({{0, 0, 3, 1.0f}}, shape, 2, 2, 1, 1);
      ApplyInput input;
      input.step = numbered ? 2 * step : -1;
      whole.Apply(*whole.Prepare(elsewhere.view()), input);
      half.Apply(*half.Prepare(nothing.view()), input);
      Train(whole, shape, 0, 4, 0.003f, numbered ? 2 * step + 1 : -1);
      Train(half, shape, 2, 2, 0.003f, numbered ? 2 * step + 1 : -1);
    }
    bool differ = false;
    for (int p = 2; p < 4; ++p) {
      for (int row = 0; row < 16; ++row) {
        const Row values = whole.ReadRow(0, p, row, kWidth);
        EXPECT_EQ(values, half.ReadRow(0, p, row, kWidth)) << numbered;
        differ |= values != whole.ReadRow(0, 2, 0, kWidth);
      }
    }
    EXPECT_TRUE(differ) << "all rows are rounded alike";
  }
}

// A seed of the update's own takes the place of the model's and of the count.
TEST(StochasticRounding, TheSameSeedRoundsAlike) {
  const TestShape shape{2, 32, 32};
  const auto weights = [&](uint64_t rng_seed, int64_t step, int before) {
    TestEngine engine({Stack(v1::BFLOAT16, shape, true)}, shape, 0, 2);
    TestBatch elsewhere({{0, 0, 0, 1.0f}}, shape, 0, 2, 1, 1);
    for (int i = 0; i < before; ++i) engine.Apply(*engine.Prepare(elsewhere.view()), {});
    Train(engine, shape, 0, 2, 0x1p-10f, step, rng_seed);
    std::vector<float> values;
    for (const float x : engine.ReadRow(0, 1, 5, kWidth)) values.push_back(x);
    return values;
  };
  const std::vector<float> seeded = weights(7, -1, 0);
  EXPECT_EQ(weights(7, -1, 3), seeded);
  EXPECT_NE(weights(8, -1, 0), seeded);
  EXPECT_NE(weights(0, -1, 0), seeded);
  EXPECT_NE(weights(7, 2, 0), seeded);
  EXPECT_NE(weights(7, 2, 0), weights(7, 3, 0));
}

TEST(StochasticRounding, AnUpdateWithASeedIsNotCounted) {
  const TestShape shape{2, 32, 32};
  const auto weights = [&](bool seeded_before) {
    TestEngine engine({Stack(v1::BFLOAT16, shape, true)}, shape, 0, 2);
    TestBatch elsewhere({{0, 0, 0, 1.0f}}, shape, 0, 2, 1, 1);
    ApplyInput seeded;
    seeded.rng_seed = 9;
    if (seeded_before) engine.Apply(*engine.Prepare(elsewhere.view()), seeded);
    Train(engine, shape, 0, 2, 0x1p-10f, -1);
    return engine.ReadRow(0, 1, 5, kWidth);
  };
  EXPECT_EQ(weights(true), weights(false));
}

}  // namespace stochastic_rounding_test
}  // namespace emberd::shard
