#include "config/numbers.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

namespace emberd::config {
namespace {

TEST(ToFloat, RoundsAsAConfigDoes) {
  constexpr float kMax = std::numeric_limits<float>::max();
  EXPECT_EQ(ToFloat(0.1), 0.1f);
  EXPECT_EQ(ToFloat(kMax), kMax);
  EXPECT_EQ(ToFloat(3.4028235e38), kMax);  // above FLT_MAX, and the text that FLT_MAX is printed as
  EXPECT_EQ(ToFloat(-3.4028235e38), -kMax);
  EXPECT_EQ(ToFloat(3.4029e38), std::nullopt);
  EXPECT_EQ(ToFloat(-1e300), std::nullopt);
  EXPECT_EQ(ToFloat(INFINITY), INFINITY);
  EXPECT_TRUE(std::isnan(*ToFloat(NAN)));
}

TEST(ToFloat, HasNoNegativeZero) {
  for (const double value : {-0.0, -1e-60}) {
    EXPECT_EQ(ToFloat(value), 0);
    EXPECT_FALSE(std::signbit(*ToFloat(value))) << value;
  }
}

TEST(NumberText, TellsAnyTwoNumbersApart) {
  EXPECT_EQ(NumberText(0.1 + 0.2), "0.30000000000000004");
  EXPECT_EQ(NumberText(0.3), "0.3");
  EXPECT_EQ(NumberText(100000), "100000");
  EXPECT_EQ(NumberText(1e300), "1e+300");
}

}  // namespace
}  // namespace emberd::config
