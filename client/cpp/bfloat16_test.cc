#include "client/cpp/bfloat16.h"

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace emberd::client {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Bfloat16Test, EveryBfloat16SurvivesTheRoundTrip) {
  for (uint32_t half = 0; half <= 0xffff; ++half) {
    const float value = FromBfloat16(static_cast<uint16_t>(half));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(FromBfloat16(ToBfloat16(value)))) << half;
    } else {
      EXPECT_EQ(ToBfloat16(value), half);
    }
  }
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

TEST(Bfloat16Test, RoundsToNearestEven) {
  const char* given = std::getenv("EMBERD_TEST_SEED");
  const uint32_t seed = given != nullptr ? std::stoul(given) : 20261121;
  std::cout << "EMBERD_TEST_SEED=" << seed << "\n";
  std::mt19937 random(seed);
  for (int i = 0; i < 200000; ++i) {
    uint32_t bits = random();
    if (i % 4 == 0) bits = (bits & 0xffff0000u) | 0x8000u;  // a tie
    const float value = std::bit_cast<float>(bits);
    // At the top of the range the upper neighbour is infinity, whose distance says nothing.
    if (!std::isfinite(value) || std::fabs(value) > 3e38f) continue;
    ASSERT_EQ(ToBfloat16(value), NearestByDistance(value)) << value;
  }
}

TEST(Bfloat16Test, Extremes) {
  EXPECT_EQ(ToBfloat16(kInfinity), 0x7f80);
  EXPECT_EQ(ToBfloat16(-kInfinity), 0xff80);
  EXPECT_EQ(ToBfloat16(-0.0f), 0x8000);
  EXPECT_EQ(FromBfloat16(ToBfloat16(std::numeric_limits<float>::max())), kInfinity);
  // A NaN whose mark lies in the lower half must not turn into infinity.
  EXPECT_TRUE(std::isnan(FromBfloat16(ToBfloat16(std::bit_cast<float>(0x7f800001u)))));
}

TEST(Bfloat16Test, BytesAreLittleEndianAtAnyAlignment) {
  const std::vector<float> values = {1.0f, -2.5f, 3.140625f};
  std::string bytes(1 + 2 * values.size(), '\0');
  ToBfloat16Bytes(values, bytes.data() + 1);
  EXPECT_EQ(bytes.substr(1), std::string("\x80\x3f\x20\xc0\x49\x40", 6));
  std::vector<float> back(values.size());
  FromBfloat16Bytes(bytes.data() + 1, absl::MakeSpan(back));
  EXPECT_EQ(back, values);
}

}  // namespace
}  // namespace emberd::client
