// Sorting by whole numbers, digit by digit from the lowest: stable, and without comparisons.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

namespace emberd {

inline constexpr int kMaxRadixBits = 48;

// `key(item, shift)`: the item's key, less than 2^bits, shifted right by so many bits; `bits` is at
// most kMaxRadixBits, and n from 1 to 2^32 - 1. `spare` has room for n items.
template <typename Item, typename Key>
void RadixSort(Item* items, Item* spare, int64_t n, int bits, Key key) {
  constexpr int kMaxDigitBits = 11;  // 2,048 counters of 4 bytes stay in the first-level cache
  constexpr int kMaxPasses = kMaxRadixBits / 8;
  // Below so many items, three passes over small counters beat two over large ones.
  const int most_bits = n < 1024 ? 8 : kMaxDigitBits;
  const int passes = std::max(1, (bits + most_bits - 1) / most_bits);
  const int digit_bits = std::max(1, (bits + passes - 1) / passes);
  const uint64_t mask = (uint64_t{1} << digit_bits) - 1;
  std::array<uint32_t, 1 << kMaxDigitBits> counters[kMaxPasses];
  for (int pass = 0; pass < passes; ++pass) {
    std::memset(counters[pass].data(), 0, sizeof(uint32_t) << digit_bits);
  }
  for (int64_t i = 0; i < n; ++i) {
    uint64_t rest = key(items[i], 0);
    for (int pass = 0; pass < passes; ++pass, rest >>= digit_bits) ++counters[pass][rest & mask];
  }
  Item* from = items;
  Item* to = spare;
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = pass * digit_bits;
    uint32_t* const position = counters[pass].data();
    // All items have the same digit: there is nothing to do.
    if (position[key(from[0], shift) & mask] == n) continue;
    uint32_t sum = 0;
    for (uint64_t digit = 0; digit <= mask; ++digit) sum += std::exchange(position[digit], sum);
    for (int64_t i = 0; i < n; ++i) to[position[key(from[i], shift) & mask]++] = from[i];
    std::swap(from, to);
  }
  if (from != items) std::copy_n(from, n, items);
}

}  // namespace emberd
