#include "shard/row_order.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

namespace emberd::shard {
namespace {

constexpr int kMaxDigitBits = 11;
constexpr int kMaxPasses = 3;  // 33 bits
constexpr int64_t kSmall = 256;

using Histogram = std::array<uint32_t, 1 << kMaxDigitBits>;

// Touches of the partition in the order of the entries: by sample.
void Extract(const StackEntries& stack, int k, int64_t rows_per_partition, Touch* out) {
  const uint64_t begin = static_cast<uint64_t>(k) * rows_per_partition;
  const Entry* entries = stack.entries.data();
  for (size_t i = 0; i < stack.samples.size(); ++i) {
    for (uint32_t j = stack.offsets[i]; j < stack.offsets[i + 1]; ++j) {
      const uint64_t row = entries[j].row - begin;  // wraps for rows of earlier partitions
      if (row < static_cast<uint64_t>(rows_per_partition)) {
        *out++ = {static_cast<uint32_t>(row), static_cast<uint32_t>(i), entries[j].gain};
      }
    }
  }
}

// One stable pass by the digit at `shift`; `count` becomes the places.
void Scatter(const Touch* from, Touch* to, int64_t n, int shift, uint32_t mask, Histogram& count) {
  uint32_t sum = 0;
  for (uint32_t digit = 0; digit <= mask; ++digit) sum += std::exchange(count[digit], sum);
  for (int64_t i = 0; i < n; ++i) to[count[from[i].row >> shift & mask]++] = from[i];
}

void RadixSort(PooledArray<Touch>& touches, PooledArray<Touch>& scratch, int64_t n,
               uint64_t max_row) {
  const int bits = std::max(1, static_cast<int>(std::bit_width(max_row)));
  const int passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
  const int digit_bits = (bits + passes - 1) / passes;
  const uint32_t mask = (1u << digit_bits) - 1;
  std::array<Histogram, kMaxPasses> counts{};
  const Touch* all = touches.data();
  for (int64_t i = 0; i < n; ++i) {
    for (int pass = 0; pass < passes; ++pass)
      ++counts[pass][all[i].row >> (pass * digit_bits) & mask];
  }
  for (int pass = 0; pass < passes; ++pass) {
    Scatter(touches.data(), scratch.data(), n, pass * digit_bits, mask, counts[pass]);
    std::swap(touches, scratch);
  }
}

}  // namespace

PooledArray<Touch> OrderByRow(const StackEntries& stack, int k, int64_t rows_per_partition,
                              BufferPool& pool) {
  const int64_t n = stack.partition_entries[k];
  PooledArray<Touch> touches(pool, n + kTouchPadding);
  Extract(stack, k, rows_per_partition, touches.data());
  if (n <= kSmall) {
    std::stable_sort(touches.data(), touches.data() + n,
                     [](const Touch& a, const Touch& b) { return a.row < b.row; });
  } else {
    PooledArray<Touch> scratch(pool, n + kTouchPadding);
    RadixSort(touches, scratch, n, rows_per_partition - 1);
  }
  std::fill_n(touches.data() + n, kTouchPadding, Touch{0, 0, 0});
  return touches;
}

}  // namespace emberd::shard
