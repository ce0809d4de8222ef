#include "base/bfloat16.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

namespace emberd {
namespace {

TEST(Bfloat16, RoundsToNearestEven) {
  EXPECT_EQ(ToBfloat16(1.0f), 0x3f80);
  EXPECT_EQ(ToBfloat16(std::bit_cast<float>(0x3f807fffu)), 0x3f80);  // just below half
  EXPECT_EQ(ToBfloat16(std::bit_cast<float>(0x3f808000u)), 0x3f80);  // half: to even
  EXPECT_EQ(ToBfloat16(std::bit_cast<float>(0x3f818000u)), 0x3f82);  // half: to even
  EXPECT_EQ(ToBfloat16(std::bit_cast<float>(0x3f808001u)), 0x3f81);  // just above half
  EXPECT_EQ(ToBfloat16(-0.0f), 0x8000);
  EXPECT_EQ(ToBfloat16(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(Bfloat16, KeepsInfinityAndNan) {
  EXPECT_EQ(ToBfloat16(INFINITY), 0x7f80);
  EXPECT_EQ(ToBfloat16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_TRUE(std::isnan(FromBfloat16(ToBfloat16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(FromBfloat16(ToBfloat16(std::bit_cast<float>(0xffffffffu)))));
}

TEST(Bfloat16, EveryValueSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t value = static_cast<uint16_t>(bits);
    const float f = FromBfloat16(value);
    if (std::isnan(f)) continue;
    EXPECT_EQ(ToBfloat16(f), value);
  }
}

}  // namespace
}  // namespace emberd
