#include "shard/batch/row_order.h"

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

// Touches of samples [begin, end) of a part that lie in the partition whose first row is given, in
// the order of the entries. Returns the end of the touches.
Touch* Extract(const StackEntries& part, uint32_t begin, uint32_t end, uint32_t first_sample,
               uint64_t first_row, uint64_t rows_per_partition, Touch* out) {
  const Entry* entries = part.entries.data();
  for (uint32_t i = begin; i < end; ++i) {
    for (uint32_t j = part.offsets[i]; j < part.offsets[i + 1]; ++j) {
      const uint64_t row = entries[j].row - first_row;  // wraps for rows of earlier partitions
      if (row < rows_per_partition) {
        *out++ = {static_cast<uint32_t>(row), first_sample + i, entries[j].gain};
      }
    }
  }
  return out;
}

// Touches of the partition in canonical sample order: what a stable sort by row needs.
void ExtractAll(absl::Span<const StackEntries* const> parts, int k, int64_t rows_per_partition,
                Touch* out) {
  const uint64_t first_row = static_cast<uint64_t>(k) * rows_per_partition;
  const size_t features = parts[0]->feature_offsets.size() - 1;
  for (size_t f = 0; f < features; ++f) {
    uint32_t first_sample = 0;
    for (const StackEntries* part : parts) {
      out = Extract(*part, part->feature_offsets[f], part->feature_offsets[f + 1], first_sample,
                    first_row, rows_per_partition, out);
      first_sample += static_cast<uint32_t>(part->samples.size());
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

PooledArray<Touch> OrderByRow(absl::Span<const StackEntries* const> parts, int k,
                              int64_t rows_per_partition, BufferPool& pool) {
  int64_t n = 0;
  for (const StackEntries* part : parts) n += part->partition_entries[k];
  PooledArray<Touch> touches(pool, n + kTouchPadding);
  ExtractAll(parts, k, rows_per_partition, touches.data());
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
