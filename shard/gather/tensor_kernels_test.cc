// Kernels against the plain loops that they stand for, bit for bit: at odd sizes, where the last
// columns are not a whole vector; with values that round up to infinity, and with NaN; in memory
// that is not aligned.
#include "shard/gather/tensor_kernels.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/floats.h"
#include "base/testing/seed.h"

namespace emberd::shard {
namespace tensor_kernels_test {

TEST(TensorKernelsTest, RoundsEveryValueAsTheScalarDoes) {
  std::mt19937 random(static_cast<uint32_t>(TestSeed()));
  for (int count = 0; count < 150; ++count) {
    std::vector<float> values(count + 1);
    for (float& value : values) {
      uint32_t bits = random();
      if (random() % 4 == 0) bits |= 0x7f800000;  // infinite, or not a number
      if (random() % 4 == 0) bits |= 0x7f7f0000;
      value = std::bit_cast<float>(bits);
    }
    std::vector<char> rounded(2 * count + 3, 'x');
    RoundToBfloat16(values.data() + 1, count, rounded.data() + 1);
    for (int i = 0; i < count; ++i) {
      uint16_t half;
      std::memcpy(&half, rounded.data() + 1 + 2 * i, sizeof(half));
      ASSERT_EQ(half, ToBfloat16(values[i + 1])) << i << " of " << count;
    }
    EXPECT_EQ(rounded.front(), 'x');
    EXPECT_EQ(rounded.back(), 'x');
  }
}

TEST(TensorKernelsTest, CopiesSingleRowsAsTheirSums) {
  std::mt19937 random(static_cast<uint32_t>(TestSeed()));
  constexpr float kSpecial[] = {-0.0f,  -1e-45f, 1e-45f,   -1e-40f, 3.4028235e38f,
                                -3e38f, 1.0f,    INFINITY, NAN};
  for (int trial = 0; trial < 200; ++trial) {
    const int64_t dim = 1 + random() % 70, count = random() % 30, kept = 8;
    const v1::DataType row_dtype = trial % 4 == 0 ? v1::BFLOAT16 : v1::FLOAT32;
    const v1::DataType dtype = trial % 2 == 0 ? v1::BFLOAT16 : v1::FLOAT32;
    std::vector<float> sums(kept * dim);  // of the rows
    std::string rows(kept * dim * 4 + 1, 'x');
    for (int64_t i = 0; i < kept * dim; ++i) {
      const float value =
          random() % 4 == 0 ? kSpecial[random() % 9] : std::ldexp(1.0f + random() % 999, -8);
      sums[i] = 0.0f + value;
      const uint16_t half = ToBfloat16(sums[i]);
      if (row_dtype == v1::FLOAT32) std::memcpy(rows.data() + 1 + 4 * i, &value, 4);
      if (row_dtype == v1::BFLOAT16) std::memcpy(rows.data() + 1 + 2 * i, &half, 2);
    }
    const size_t row_bytes = dim * (row_dtype == v1::FLOAT32 ? 4 : 2);
    const size_t out_bytes = dim * (dtype == v1::FLOAT32 ? 4 : 2), stride = out_bytes + 3;
    std::vector<const char*> of_sample(count);
    std::string expected(count * stride + 1, 'x'), out = expected;
    for (int64_t i = 0; i < count; ++i) {
      const size_t row = random() % (kept + 1);
      char* const to = expected.data() + 1 + i * stride;
      std::memset(to, 0, out_bytes);
      if (row == kept) continue;
      of_sample[i] = rows.data() + 1 + row * row_bytes;
      for (int64_t c = 0; c < dim; ++c) {
        const float sum = sums[row * dim + c];
        const uint16_t half = ToBfloat16(sum);
        if (dtype == v1::FLOAT32) std::memcpy(to + 4 * c, &sum, 4);
        if (dtype == v1::BFLOAT16) std::memcpy(to + 2 * c, &half, 2);
      }
    }
    CopySingleRows({of_sample.data(), row_dtype, count, dim, out.data() + 1, dtype, stride});
    ASSERT_TRUE(out == expected) << "trial " << trial;
  }
}

TEST(TensorKernelsTest, SumsByRowInTheOrderOfSamples) {
  std::mt19937 random(static_cast<uint32_t>(TestSeed()));
  for (int trial = 0; trial < 100; ++trial) {
    const int64_t dim = 1 + random() % 70, width = (dim + 7) / 8 * 8;
    const int rows = 1 + random() % 5, count = random() % 20, first_sample = random() % 10;
    const bool half = trial % 2 == 1;
    const size_t element = half ? 2 : 4;
    std::vector<int32_t> samples;
    std::vector<uint32_t> offsets = {0};
    std::vector<Entry> entries;
    for (int i = 0; i < count; ++i) {
      samples.push_back(first_sample + 2 * i);
      for (size_t n = 1 + random() % 3; n > 0; --n) {
        entries.push_back({static_cast<uint32_t>(random() % rows), random() % 100 * 0.37f});
      }
      offsets.push_back(static_cast<uint32_t>(entries.size()));
    }
    entries.resize(entries.size() + kEntryPadding);
    std::vector<char> bytes(1 + 2 * count * dim * element);
    std::vector<float> values(2 * count * dim);
    for (size_t i = 0; i < values.size(); ++i) {
      const float value = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 300;
      const uint16_t rounded = ToBfloat16(value);
      values[i] = half ? FromBfloat16(rounded) : value;
      std::memcpy(bytes.data() + 1 + i * element,
                  half ? static_cast<const void*>(&rounded) : &value, element);
    }
    std::vector<float> expected(rows * width, 7), sums = expected;
    std::vector<uint8_t> known(rows), begun = known;
    for (int i = 0; i < count; ++i) {
      for (uint32_t e = offsets[i]; e < offsets[i + 1]; ++e) {
        float* sum = expected.data() + entries[e].row * width;
        if (known[entries[e].row]++ == 0) std::fill_n(sum, width, 0.0f);
        for (int64_t c = 0; c < dim; ++c) {
          sum[c] = sum[c] + entries[e].gain * values[2 * i * dim + c];
        }
      }
    }
    RowSumArgs args;
    args.gradients = bytes.data() + 1;
    args.dtype = half ? v1::BFLOAT16 : v1::FLOAT32;
    args.first_sample = first_sample;
    args.dim = dim;
    args.width = width;
    args.samples = samples.data();
    args.offsets = offsets.data();
    args.entries = entries.data();
    args.end = count;
    args.sums = sums.data();
    args.begun = begun.data();
    EXPECT_TRUE(AddToRowSums(args));
    ASSERT_EQ(std::memcmp(sums.data(), expected.data(), sums.size() * sizeof(float)), 0);
    for (int row = 0; row < rows; ++row) EXPECT_EQ(begun[row] != 0, known[row] != 0);
  }
}

// A value that is not finite, and a sum that becomes so, in any column of any sample.
TEST(TensorKernelsTest, SaysIfASumIsNotFinite) {
  const float most = std::numeric_limits<float>::max();
  const int32_t samples[] = {5, 6, 8};
  const uint32_t offsets[] = {0, 1, 2, 3};
  std::vector<Entry> entries(3 + kEntryPadding);
  entries[1].row = 1;
  for (Entry& entry : entries) entry.gain = 1;
  RowSumArgs args;
  args.first_sample = 5;
  args.samples = samples;
  args.offsets = offsets;
  args.entries = entries.data();
  args.end = 3;
  for (const int64_t dim : {1, 7, 8, 19, 64}) {
    args.dim = args.width = dim;
    const auto sum = [&](const std::vector<float>& gradients) {
      std::vector<float> sums(2 * dim);
      std::vector<uint8_t> begun(2);
      args.gradients = reinterpret_cast<const char*>(gradients.data());
      args.sums = sums.data();
      args.begun = begun.data();
      return AddToRowSums(args);
    };
    const std::vector<float> good(4 * dim, -most / 2);
    EXPECT_TRUE(sum(good));
    for (int64_t column = 0; column < dim; ++column) {
      for (const float bad : {std::nanf(""), -std::nanf(""), std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity(), -most}) {
        for (const int sample : {0, 1, 3}) {
          std::vector<float> gradients = good;
          gradients[sample * dim + column] = bad;
          // The rows of samples 0 and 3 are the same, and their sum overflows.
          EXPECT_EQ(sum(gradients), bad == -most && sample == 1) << bad << " in " << sample;
        }
        std::vector<float> gradients = good;
        gradients[2 * dim + column] = bad;
        EXPECT_TRUE(sum(gradients)) << "of a sample that is not there";
      }
    }
  }
}

}  // namespace tensor_kernels_test
}  // namespace emberd::shard
