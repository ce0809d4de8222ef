#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "base/floats.h"

namespace emberd {
namespace finite_test {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMax = std::numeric_limits<float>::max();

TEST(FiniteTest, FindsTheFirstWhereverItIs) {
  // About the lengths of a SIMD register and of a block.
  for (const int size : {0, 1, 7, 33, 4095, 4096, 4097, 12345}) {
    std::vector<float> values(size, -kMax);
    EXPECT_EQ(FindNonFinite(values), -1) << size;
    for (const int bad : {size - 1, size / 2, 0}) {
      if (bad < 0 || bad >= size) continue;
      values[bad] = bad % 3 == 0 ? NAN : bad % 3 == 1 ? kInf : -kInf;
      EXPECT_EQ(FindNonFinite(values), bad) << size;
    }
  }
}

TEST(FiniteTest, ReadsBfloat16AtAnyAlignment) {
  std::vector<uint16_t> values(5000, ToBfloat16(-3e38f));
  const auto find = [&] {
    std::vector<char> bytes(1 + values.size() * sizeof(uint16_t));
    std::memcpy(bytes.data() + 1, values.data(), values.size() * sizeof(uint16_t));
    return FindNonFiniteBfloat16(bytes.data() + 1, static_cast<int64_t>(values.size()));
  };
  EXPECT_EQ(find(), -1);
  values[4999] = ToBfloat16(-kInf);
  EXPECT_EQ(find(), 4999);
  values[70] = ToBfloat16(NAN);
  EXPECT_EQ(find(), 70);
}

}  // namespace finite_test
}  // namespace emberd
