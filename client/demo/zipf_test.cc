#include "client/demo/zipf.h"

#include <cmath>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

namespace emberd::demo {
namespace {

class ZipfTest : public testing::TestWithParam<std::tuple<int64_t, double>> {};

// Would catch a wrong acceptance rule, which bends the frequencies of the first ranks without
// breaking anything else: each is compared with the exact law.
TEST_P(ZipfTest, FrequenciesFollowTheLaw) {
  const auto [size, exponent] = GetParam();
  const ZipfDistribution zipf(size, exponent);
  double total = 0;
  for (int64_t k = 1; k <= size; ++k) total += std::pow(static_cast<double>(k), -exponent);
  constexpr int kDraws = 300'000;
  std::vector<int> counts(size + 1);
  Draws draws(5, 0, 0);
  for (int i = 0; i < kDraws; ++i) {
    const int64_t rank = zipf.Sample(&draws);
    ASSERT_GE(rank, 1);
    ASSERT_LE(rank, size);
    ++counts[rank];
  }
  int64_t tail = 0;
  for (int64_t k = 1; k <= size; ++k) {
    const double expected = kDraws * std::pow(static_cast<double>(k), -exponent) / total;
    if (k <= 10) {
      EXPECT_NEAR(counts[k], expected, 5 * std::sqrt(expected)) << "rank " << k;
    }
    if (k > size / 2) tail += counts[k];
  }
  double expected_tail = 0;
  for (int64_t k = size / 2 + 1; k <= size; ++k) {
    expected_tail += kDraws * std::pow(static_cast<double>(k), -exponent) / total;
  }
  EXPECT_NEAR(tail, expected_tail, 5 * std::sqrt(expected_tail) + 1);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ZipfTest,
                         testing::Values(std::tuple(int64_t{1}, 1.1), std::tuple(int64_t{2}, 1.1),
                                         std::tuple(int64_t{3}, 0.5),
                                         std::tuple(int64_t{100}, 1.05),
                                         std::tuple(int64_t{1'000'000}, 1.05)));

}  // namespace
}  // namespace emberd::demo
