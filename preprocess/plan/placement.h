// Where a row of a table lies: partition and local row; and the rounding that the layout
// rests on. Formulas are those of TensorFlow's and JAX's mod sharding with rotation.
#pragma once

#include <bit>
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
  return count == 0 ? 0 : static_cast<int>(std::bit_width(count - 1));
}

// A table inside a stack of P partitions. P need not be a power of two here.
struct RowPlacement {
  int64_t partitions = 1;
  int64_t rotation = 0;    // in [0, P)
  int64_t row_offset = 0;  // first local row of the table in every partition

  int64_t Partition(int64_t id) const { return (id + rotation) % partitions; }
  int64_t LocalRow(int64_t id) const { return id / partitions + row_offset; }
};

// The rotation of a plan that names none: the odd number nearest to 0.618 * P, mod P. Neighbours in
// a stack land far from each other, an odd step visits every partition, and the value depends on P
// alone.
constexpr int DefaultRotation(int partitions) {
  const double golden = 0.6180339887498949 * partitions;
  int best = 1;
  for (int odd = 1; odd <= partitions + 1; odd += 2) {
    const double distance = odd > golden ? odd - golden : golden - odd;
    const double best_distance = best > golden ? best - golden : golden - best;
    if (distance < best_distance) best = odd;
  }
  return best % partitions;
}

}  // namespace emberd::preprocess
