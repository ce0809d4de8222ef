#include "shard/store/portable_numbers.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

namespace emberd::shard {
namespace portable_numbers_test {

TEST(PortableMath, LogAgreesWithTheLibrary) {
  for (double x = 1e-310; x < 1e300; x *= 1.37) {
    EXPECT_NEAR(PortableLog(x), std::log(x), 1e-14 * std::abs(std::log(x)) + 1e-16) << x;
  }
  for (double x = 0.5; x < 2; x += 1e-4) EXPECT_NEAR(PortableLog(x), std::log(x), 3e-16) << x;
  EXPECT_EQ(PortableLog(1), 0);
}

TEST(PortableMath, ExpAgreesWithTheLibrary) {
  for (double x = -700; x < 700; x += 0.173) {
    EXPECT_NEAR(PortableExp(x) / std::exp(x), 1, 1e-14) << x;
  }
  EXPECT_EQ(PortableExp(0), 1);
  EXPECT_EQ(PortableExp(-800), 0);
  EXPECT_EQ(PortableExp(800), std::numeric_limits<double>::infinity());
}

TEST(PortableMath, PowAgreesWithTheLibrary) {
  for (double y : {-2.5, -1.0 / 3, 0.0, 0.3, 0.7, 2.0}) {
    for (double x = 1e-20; x < 1e20; x *= 1.9) {
      EXPECT_NEAR(PortablePow(x, y) / std::pow(x, y), 1, 1e-13) << x << " " << y;
    }
    EXPECT_EQ(PortablePow(0, y), std::pow(0, y));
    EXPECT_EQ(PortablePow(INFINITY, y), std::pow(INFINITY, y));
  }
  EXPECT_TRUE(std::isnan(PortablePow(-1, 0.5)));
}

// Prevents a wrong digit in one of the 21 constants: the quantile must invert the distribution
// function everywhere.
TEST(PortableMath, InverseNormalInvertsTheDistribution) {
  for (double p = 1e-12; p < 1; p += p < 0.01 ? p * 0.1 : 1e-4) {
    const double z = InverseNormal(p);
    EXPECT_NEAR(0.5 * std::erfc(-z / std::sqrt(2.0)) / p, 1, 2e-9 * (1 + z * z)) << p;
  }
  EXPECT_EQ(InverseNormal(0.5), 0);
  EXPECT_NEAR(InverseNormal(0.975), 1.959963984540054, 4e-9);
  EXPECT_EQ(InverseNormal(0.25), -InverseNormal(0.75));
}

}  // namespace portable_numbers_test
}  // namespace emberd::shard
