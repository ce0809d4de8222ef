#include "preprocess/batch/radix_sort.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace emberd::preprocess {
namespace {

constexpr int kKeyShift = 32;
constexpr int kMaxDigitBits = 11;  // 2,048 counters of 4 bytes stay in the first-level cache
constexpr int kMaxPasses = 4;      // 32 live bits in digits of 8 or more
// Below so many keys, clearing and summing counters costs more than a comparison sort.
constexpr int64_t kFewKeys = 48;
// Below so many, three passes over small counters beat two over large ones.
constexpr int64_t kSomeKeys = 1024;
constexpr int kSmallDigitBits = 8;

using Counters = std::array<uint32_t, 1 << kMaxDigitBits>;

void Count(const uint64_t* keys, int64_t n, int passes, int digit_bits, Counters* counters) {
  const uint64_t mask = (uint64_t{1} << digit_bits) - 1;
  for (int pass = 0; pass < passes; ++pass) {
    std::memset(counters[pass].data(), 0, sizeof(uint32_t) << digit_bits);
  }
  for (int64_t i = 0; i < n; ++i) {
    uint64_t rest = keys[i] >> kKeyShift;
    for (int pass = 0; pass < passes; ++pass, rest >>= digit_bits) ++counters[pass][rest & mask];
  }
}

// Counts to first positions; false if one digit value has all n keys.
bool SumUp(int64_t n, int digit_bits, Counters* counters) {
  uint32_t position = 0;
  for (int value = 0; value < 1 << digit_bits; ++value) {
    const uint32_t count = (*counters)[value];
    if (count == n) return false;
    (*counters)[value] = position;
    position += count;
  }
  return true;
}

}  // namespace

uint64_t* SortKeys(uint64_t* keys, uint64_t* spare, int64_t n, int live_bits) {
  if (n < kFewKeys) {
    std::sort(keys, keys + n);
    return keys;
  }
  const int most_bits = n < kSomeKeys ? kSmallDigitBits : kMaxDigitBits;
  const int passes = std::max(1, (live_bits + most_bits - 1) / most_bits);
  const int digit_bits = std::max(1, (live_bits + passes - 1) / passes);
  static_assert(kMaxPasses * kSmallDigitBits >= 32);
  Counters counters[kMaxPasses];
  Count(keys, n, passes, digit_bits, counters);
  const uint64_t mask = (uint64_t{1} << digit_bits) - 1;
  for (int pass = 0; pass < passes; ++pass) {
    if (!SumUp(n, digit_bits, &counters[pass])) continue;
    const int shift = kKeyShift + pass * digit_bits;
    uint32_t* position = counters[pass].data();
    for (int64_t i = 0; i < n; ++i) spare[position[keys[i] >> shift & mask]++] = keys[i];
    std::swap(keys, spare);
  }
  return keys;
}

}  // namespace emberd::preprocess
