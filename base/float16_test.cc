#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "base/floats.h"

namespace emberd {
namespace float16_test {

// By the definition of binary16.
double Exact(uint16_t half) {
  const int exponent = half >> 10 & 31;
  const double fraction = half & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

// The finite value nearest to x, of two the one with an even last bit.
uint16_t Nearest(float x) {
  const double magnitude = std::abs(static_cast<double>(x));
  uint16_t low = 0, high = kMaxFloat16;  // Exact(low) <= magnitude unless it is the largest
  while (low < high) {
    const uint16_t middle = static_cast<uint16_t>((low + high + 1) / 2);
    if (Exact(middle) <= magnitude) {
      low = middle;
    } else {
      high = static_cast<uint16_t>(middle - 1);
    }
  }
  if (low < kMaxFloat16) {
    const double down = magnitude - Exact(low), up = Exact(low + 1) - magnitude;
    if (up < down || (up == down && low % 2 == 1)) ++low;
  }
  return std::signbit(x) ? low | 0x8000 : low;
}

TEST(Float16, EveryValueSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    if ((half & 0x7c00) == 0x7c00) continue;
    ASSERT_EQ(FromFloat16(half), Exact(half)) << bits;
    ASSERT_EQ(ToFloat16(FromFloat16(half)), half) << bits;
  }
}

TEST(Float16, RoundsToTheNearestAndSaturates) {
  const auto check = [](float x) {
    ASSERT_EQ(ToFloat16(x), Nearest(x)) << x;
    ASSERT_EQ(ToFloat16(-x), Nearest(-x)) << -x;
  };
  for (int half = 0; half <= kMaxFloat16; ++half) {  // around each value and each middle
    const double middle = Exact(half) + (Exact(half + 1) - Exact(half)) / 2;
    for (const float x : {static_cast<float>(Exact(half)), static_cast<float>(middle)}) {
      check(x);
      check(std::nextafter(x, 0.0f));
      check(std::nextafter(x, std::numeric_limits<float>::infinity()));
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 200'000; ++i) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isfinite(x)) check(x);
  }
  check(std::numeric_limits<float>::max());
  check(std::numeric_limits<float>::denorm_min());
}

TEST(Float16, InfinitySaturatesAndNanStays) {
  EXPECT_EQ(ToFloat16(INFINITY), 0x7bff);
  EXPECT_EQ(ToFloat16(-INFINITY), 0xfbff);
  for (const uint32_t nan : {0x7f800001u, 0x7fc00000u, 0xffffffffu}) {
    EXPECT_TRUE(std::isnan(FromFloat16(ToFloat16(std::bit_cast<float>(nan)))));
  }
  EXPECT_EQ(FromFloat16(0x7c00), INFINITY);
}

}  // namespace float16_test
}  // namespace emberd
