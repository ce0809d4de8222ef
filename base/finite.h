// Whether values from outside are finite, checked at the speed of memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "absl/types/span.h"

namespace emberd {

// Of values whose exponent bits are `exponent`: float32 or bfloat16, at any alignment.
template <typename Bits>
int64_t FindNonFiniteBits(const char* data, int64_t size, Bits exponent) {
  const auto is_bad = [data, exponent](int64_t i) {
    Bits bits;
    std::memcpy(&bits, data + i * sizeof(Bits), sizeof(Bits));
    return (bits & exponent) == exponent;
  };
  // A block is searched only if it has one: a loop without a way out becomes SIMD.
  constexpr int64_t kBlock = 4096;
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t end = begin + kBlock < size ? begin + kBlock : size;
    Bits any = 0;
    for (int64_t i = begin; i < end; ++i) any = static_cast<Bits>(any | (is_bad(i) ? 1 : 0));
    if (any == 0) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (is_bad(i)) return i;
    }
  }
  return -1;
}

// Index of the first NaN or infinity among `size` little-endian values; -1 if all are finite.
inline int64_t FindNonFiniteFloat32(const char* data, int64_t size) {
  return FindNonFiniteBits<uint32_t>(data, size, 0x7f800000);
}
inline int64_t FindNonFiniteBfloat16(const char* data, int64_t size) {
  return FindNonFiniteBits<uint16_t>(data, size, 0x7f80);
}
inline int64_t FindNonFinite(absl::Span<const float> values) {
  return FindNonFiniteFloat32(reinterpret_cast<const char*>(values.data()),
                              static_cast<int64_t>(values.size()));
}

}  // namespace emberd
