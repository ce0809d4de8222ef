#include "preprocess/batch/sort_and_merge.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "base/testing/seed.h"
#include "tests/testing/random_case.h"

namespace emberd::preprocess {
namespace {

// Would catch: a lost or doubled key, an unstable pass, a pass left out that was needed.
TEST(SortKeysTest, SortsLikeTheStandardLibrary) {
  Random random(TestSeed(1));
  for (int64_t n : {0, 1, 2, 191, 192, 193, 1000, 5000, 70000}) {
    for (int bits : {0, 1, 5, 8, 11, 12, 20, 22, 23, 27, 31, 32}) {
      for (bool narrow : {false, true}) {
        std::vector<uint64_t> keys(n);
        for (int64_t i = 0; i < n; ++i) {
          uint64_t upper = bits == 0 ? 0 : random() >> (64 - bits);
          if (narrow) upper &= 0xf0f0f0f0u;  // leaves whole digits equal
          keys[i] = upper << 32 | static_cast<uint64_t>(i);
        }
        std::vector<uint64_t> expected = keys, spare(n);
        std::sort(expected.begin(), expected.end());
        const uint64_t* sorted = SortKeys(keys.data(), spare.data(), n, bits);
        ASSERT_TRUE(std::equal(expected.begin(), expected.end(), sorted)) << n << " " << bits;
      }
    }
  }
}

}  // namespace
}  // namespace emberd::preprocess
