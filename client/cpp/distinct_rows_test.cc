// Activations that are made of rows, and sums of gradients, against plain loops. Catches: a sample
// that gets another's row, sums in another order than that of the samples, -0 where a sum is +0,
// halves of sums that are not those of the sum, and sums that are called finite and are not.
#include "client/cpp/distinct_rows.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "base/bfloat16.h"
#include "base/testing/seed.h"
#include "client/cpp/tensor_codec.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace emberd::client {
namespace distinct_rows_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<uint32_t> Bits(absl::Span<const float> values) {
  std::vector<uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

IndexedRows RandomRows(std::mt19937& random, int64_t rows, int samples) {
  IndexedRows result = {rows, {}};
  for (int s = 0; s < samples; ++s) {
    result.index.push_back(static_cast<int32_t>(random() % (rows + 1)) - 1);
  }
  return result;
}

// Of many sizes; a third of them zeros of either sign, and some that bfloat16 rounds to -0.
float RandomValue(std::mt19937& random) {
  if (random() % 10 == 0) return -std::numeric_limits<float>::denorm_min();
  const auto value = static_cast<float>(static_cast<int>(random() % 2001) - 1000) *
                     std::ldexp(1.0f, static_cast<int>(random() % 40) - 20);
  return random() % 3 == 0 ? std::copysign(0.0f, value) : value;
}

TEST(DistinctRowsTest, SpreadsRowsAsSums) {
  std::mt19937 random(TestSeed());
  for (int round = 0; round < 200; ++round) {
    const auto type = round % 2 == 0 ? WireType::kFloat32 : WireType::kBfloat16;
    const int64_t rows = 1 + random() % 20, dim = 1 + random() % 40, width = dim + random() % 8;
    const int64_t stride = dim + random() % 9;
    const IndexedRows of = RandomRows(random, rows, random() % 50);
    std::vector<float> values(rows * width);
    for (float& value : values) value = RandomValue(random);
    // Wherever they lie.
    const size_t row_bytes = width * ElementBytes(type);
    std::vector<char> bytes(rows * row_bytes + 1);
    if (type == WireType::kFloat32) {
      std::memcpy(bytes.data() + 1, values.data(), rows * row_bytes);
    } else {
      ToBfloat16Bytes(values, bytes.data() + 1);
    }
    std::vector<const char*> places;
    for (int64_t row = 0; row < rows; ++row) places.push_back(bytes.data() + 1 + row * row_bytes);
    const auto samples = static_cast<int64_t>(of.index.size());
    const float untouched = 77;
    std::vector<float> found(samples * stride + 1, untouched), expected = found;
    for (int64_t s = 0; s < samples; ++s) {
      for (int64_t c = 0; c < dim; ++c) {
        const int32_t row = of.index[s];
        const float value = row < 0 ? 0 : values[row * width + c];
        expected[s * stride + c] =
            type == WireType::kFloat32 ? 0.0f + value : FromBfloat16(ToBfloat16(value));
      }
    }
    SpreadRows(of, places, type, dim, stride, found.data());
    ASSERT_EQ(Bits(found), Bits(expected)) << "round " << round;
  }
}

TEST(DistinctRowsTest, SumsInTheOrderOfTheSamples) {
  std::mt19937 random(TestSeed());
  for (int round = 0; round < 200; ++round) {
    const int64_t rows = 1 + random() % 20, dim = 1 + random() % 40;
    const int64_t stride = round % 2 == 0 ? 0 : dim + random() % 5;
    const IndexedRows of = RandomRows(random, rows, random() % 100);
    const auto samples = static_cast<int64_t>(of.index.size());
    std::vector<float> values(samples * std::max(stride, dim));
    for (float& value : values) value = RandomValue(random);
    std::vector<float> expected(rows * dim, 0.0f), found(rows * dim, 77.0f);
    for (int64_t s = 0; s < samples; ++s) {
      for (int64_t c = 0; c < dim && of.index[s] >= 0; ++c) {
        expected[of.index[s] * dim + c] += values[s * std::max(stride, dim) + c];
      }
    }
    const FeatureGradient gradient = {"f", values, samples, stride};
    EXPECT_TRUE(SumByRow(of, gradient, dim, found.data()));
    ASSERT_EQ(Bits(found), Bits(expected)) << "round " << round;
  }
}

TEST(DistinctRowsTest, SumsRoundedGradientsInHalves) {
  std::mt19937 random(TestSeed());
  int repeated_rows = 0, single_rows = 0;
  for (int round = 0; round < 200; ++round) {
    const int64_t rows = 1 + random() % 20, dim = 1 + random() % 40;
    const int64_t stride = round % 2 == 0 ? 0 : dim + random() % 5;
    const IndexedRows of = RandomRows(random, rows, random() % 40);
    const auto samples = static_cast<int64_t>(of.index.size());
    std::vector<float> values(samples * std::max(stride, dim));
    for (float& value : values) value = RandomValue(random);
    std::vector<float> expected(rows * dim, 0.0f);
    std::vector<int> counts(rows);
    for (int64_t s = 0; s < samples; ++s) {
      if (of.index[s] >= 0) ++counts[of.index[s]];
      for (int64_t c = 0; c < dim && of.index[s] >= 0; ++c) {
        const float value = values[s * std::max(stride, dim) + c];
        expected[of.index[s] * dim + c] += FromBfloat16(ToBfloat16(value));
      }
    }
    std::vector<int32_t> expected_repeated;
    for (int row = 0; row < rows; ++row) {
      if (counts[row] > 1) expected_repeated.push_back(row);
      single_rows += counts[row] == 1 ? 1 : 0;
    }
    const std::vector<int32_t> repeated = FindRepeated(of);
    ASSERT_EQ(repeated, expected_repeated);
    repeated_rows += static_cast<int>(repeated.size());
    std::vector<uint16_t> halves((rows + repeated.size()) * dim, 7777);
    std::vector<float> scratch(repeated.size() * dim, 7777);
    const FeatureGradient gradient = {"f", values, samples, stride};
    EXPECT_TRUE(SumRoundedByRow(of, repeated, gradient, dim, scratch.data(), halves.data()));
    std::vector<uint32_t> found;
    for (int64_t i = 0; i < rows * dim; ++i) found.push_back(uint32_t{halves[i]} << 16);
    for (size_t i = 0; i < repeated.size() * dim; ++i) {
      found[repeated[i / dim] * dim + i % dim] |= halves[rows * dim + i];
    }
    ASSERT_EQ(found, Bits(expected)) << "round " << round;
  }
  EXPECT_GT(repeated_rows, 100);
  EXPECT_GT(single_rows, 100);
}

// By both ways of summing: of float32, and of what is rounded to bfloat16.
class NonFiniteSumsTest : public ::testing::TestWithParam<bool> {
 protected:
  bool Sum(const std::vector<float>& values, int dim) const {
    const IndexedRows rows = {3, {0, 1, -1, 1, 2}};
    const FeatureGradient gradient = {"f", values, 5};
    std::vector<float> sums(3 * dim);
    if (!GetParam()) return SumByRow(rows, gradient, dim, sums.data());
    std::vector<uint16_t> halves(4 * dim);
    return SumRoundedByRow(rows, FindRepeated(rows), gradient, dim, sums.data(), halves.data());
  }
};
INSTANTIATE_TEST_SUITE_P(Rounded, NonFiniteSumsTest, ::testing::Bool());

TEST_P(NonFiniteSumsTest, AreTold) {
  constexpr float kMostFloat = std::numeric_limits<float>::max();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float most = GetParam() ? FromBfloat16(0x7f7f) : kMostFloat;
  for (int dim = 1; dim < 40; ++dim) {
    for (int column = 0; column < dim; ++column) {
      std::vector<float> values(5 * dim, 1.0f);
      const auto finite = [&] { return Sum(values, dim); };
      const auto set = [&](int sample, float value) { values[sample * dim + column] = value; };
      ASSERT_TRUE(finite());
      // Of a row of one sample, of one of several, and of a sample that has none.
      for (const int sample : {0, 1, 2, 3, 4}) {
        for (const float bad : {kInfinity, -kInfinity, std::nanf(""), -std::nanf("")}) {
          set(sample, bad);
          ASSERT_FALSE(finite()) << bad << " of sample " << sample << ", " << dim << ", " << column;
        }
        set(sample, std::bit_cast<float>(0x7fffffff));
        ASSERT_FALSE(finite()) << "a NaN to which nothing can be added";
        set(sample, -most);
        ASSERT_TRUE(finite());
        set(sample, kMostFloat);
        ASSERT_EQ(finite(), !GetParam()) << "rounded, it is not finite";
        set(sample, 1);
      }
      set(1, most);
      set(3, most);
      ASSERT_FALSE(finite()) << "each is finite, and their sum is not";
    }
  }
}

#if defined(__x86_64__)
// torch.set_flush_denormal(True), for one, makes such a thread.
TEST(DistinctRowsTest, AThreadMayFlushTinyValues) {
  constexpr uint32_t kFlushToZero = 0x8000, kDenormalsAreZeros = 0x0040;
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(before | kFlushToZero | kDenormalsAreZeros);
  const IndexedRows rows = {2, {0, 1, 1}};
  const uint32_t tiny = 0x00300000;  // that bfloat16 can hold
  const std::vector<float> values(3, std::bit_cast<float>(tiny));
  std::vector<float> sums(2), scratch(1), spread(3);
  std::vector<uint16_t> halves(3);
  SumByRow(rows, {"f", values, 3}, 1, sums.data());
  SumRoundedByRow(rows, FindRepeated(rows), {"f", values, 3}, 1, scratch.data(), halves.data());
  const auto* const row = reinterpret_cast<const char*>(values.data());
  SpreadRows(rows, {row, row}, WireType::kFloat32, 1, 1, spread.data());
  const uint32_t after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(after & (kFlushToZero | kDenormalsAreZeros), kFlushToZero | kDenormalsAreZeros);
  EXPECT_THAT(Bits(sums), ElementsAre(tiny, 2 * tiny));
  EXPECT_THAT(halves, ElementsAre(tiny >> 16, 2 * tiny >> 16, 0));
  EXPECT_THAT(Bits(spread), ElementsAre(tiny, tiny, tiny));
}
#endif

TEST(DistinctRowsTest, AnIndexMustNameARow) {
  EXPECT_TRUE(CheckIndex({3, {0, -1, 2}}).ok());
  EXPECT_TRUE(CheckIndex({0, {-1}}).ok());
  EXPECT_TRUE(CheckIndex({0, {}}).ok());
  for (const int32_t bad :
       {3, -2, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    const absl::Status status = CheckIndex({3, {0, bad}});
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(status.message(), HasSubstr("for sample 1; it must be in [-1, 3)"));
  }
}

}  // namespace distinct_rows_test
}  // namespace emberd::client
