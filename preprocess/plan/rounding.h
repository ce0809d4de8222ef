// Rounding that the layout of tables and buffers rests on.
#pragma once

#include <cstdint>

namespace emberd::preprocess {

// Rows of a table in one partition and columns of a row are multiples of this many.
inline constexpr int64_t kTableAlignment = 8;

// The smallest multiple of `multiple` that is >= value; value >= 0.
constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr int64_t PaddedWidth(int64_t embedding_dim) {
  return RoundUp(embedding_dim, kTableAlignment);
}

// So many rows that each of the partitions holds the same number, a multiple of 8.
constexpr int64_t PaddedRows(int64_t vocabulary_size, int64_t partitions) {
  return RoundUp(vocabulary_size, kTableAlignment * partitions);
}

constexpr bool IsPowerOfTwo(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

// Bits that hold the values 0 to count - 1; 0 for a count of 0 or 1.
constexpr int BitsFor(uint64_t count) {
  int bits = 0;
  while (bits < 64 && (uint64_t{1} << bits) < count) ++bits;
  return bits;
}

}  // namespace emberd::preprocess
