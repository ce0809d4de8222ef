#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/floats.h"
#include "base/testing/seed.h"

namespace emberd {
namespace bfloat16_test {

TEST(Bfloat16, RoundsToNearestEven) {
  EXPECT_EQ(ToBfloat16(1.0f), 0x3f80);
  EXPECT_EQ(ToBfloat16(std::bit_cast<float>(0x3f807fffu)), 0x3f80);  // just below half
  EXPECT_EQ(ToBfloat16(std::bit_cast<float>(0x3f808000u)), 0x3f80);  // half: to even
  EXPECT_EQ(ToBfloat16(std::bit_cast<float>(0x3f818000u)), 0x3f82);  // half: to even
  EXPECT_EQ(ToBfloat16(std::bit_cast<float>(0x3f808001u)), 0x3f81);  // just above half
  EXPECT_EQ(ToBfloat16(-0.0f), 0x8000);
  EXPECT_EQ(ToBfloat16(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(Bfloat16, BytesAreLittleEndianAtAnyAlignment) {
  const std::vector<float> values = {1.0f, -2.5f, 3.140625f};
  std::string bytes(1 + 2 * values.size(), '\0');
  ToBfloat16Bytes(values, bytes.data() + 1);
  EXPECT_EQ(bytes.substr(1), std::string("\x80\x3f\x20\xc0\x49\x40", 6));
  std::vector<float> back(values.size());
  FromBfloat16Bytes(bytes.data() + 1, absl::MakeSpan(back));
  EXPECT_EQ(back, values);
}

// The reference looks at both neighbours in double, where their distance to the value is exact.
uint16_t NearestByDistance(float value) {
  const uint16_t down = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  const uint16_t up = static_cast<uint16_t>(down + 1);
  const double to_down = std::fabs(static_cast<double>(value) - FromBfloat16(down));
  const double to_up = std::fabs(static_cast<double>(value) - FromBfloat16(up));
  if (to_down != to_up) return to_down < to_up ? down : up;
  return down % 2 == 0 ? down : up;
}

TEST(Bfloat16, RoundsToTheNearerNeighbour) {
  std::mt19937 random(static_cast<uint32_t>(TestSeed()));
  for (int i = 0; i < 200000; ++i) {
    uint32_t bits = random();
    if (i % 4 == 0) bits = (bits & 0xffff0000u) | 0x8000u;  // a tie
    const float value = std::bit_cast<float>(bits);
    // At the top of the range the upper neighbour is infinity, whose distance says nothing.
    if (!std::isfinite(value) || std::fabs(value) > 3e38f) continue;
    ASSERT_EQ(ToBfloat16(value), NearestByDistance(value)) << value;
  }
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

}  // namespace bfloat16_test
}  // namespace emberd
