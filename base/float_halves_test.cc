// Catches: bits lost where a half lies at an odd address, halves in the wrong place, and loops that
// treat the last values otherwise.
#include "base/float_halves.h"

#include <bit>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/testing/seed.h"

namespace emberd {
namespace float_halves_test {

TEST(FloatHalvesTest, MakeTheFloatsThatWereCut) {
  std::mt19937 random(static_cast<uint32_t>(TestSeed()));
  for (int count = 0; count < 300; ++count) {
    std::vector<uint32_t> bits(count);
    std::vector<uint16_t> upper, lower;
    for (uint32_t& value : bits) {
      value = static_cast<uint32_t>(random());  // NaN and what is subnormal, too
      upper.push_back(static_cast<uint16_t>(value >> 16));
      lower.push_back(static_cast<uint16_t>(value));
    }
    const auto at_odd_address = [](const std::vector<uint16_t>& halves) {
      return " " + std::string(reinterpret_cast<const char*>(halves.data()), halves.size() * 2);
    };
    const std::string uppers = at_odd_address(upper), lowers = at_odd_address(lower);
    std::vector<float> floats(count + 1, 7.5f);
    FloatsOfUpperHalves(uppers.data() + 1, count, floats.data());
    for (int i = 0; i < count; ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(floats[i]), bits[i] & 0xffff0000u) << i << " of " << count;
    }
    AddLowerHalves(lowers.data() + 1, count, floats.data());
    for (int i = 0; i < count; ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(floats[i]), bits[i]) << i << " of " << count;
    }
    ASSERT_EQ(floats[count], 7.5f) << "is no part of " << count;
  }
}

}  // namespace float_halves_test
}  // namespace emberd
