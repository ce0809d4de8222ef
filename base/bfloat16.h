// bfloat16: the upper half of a float32. NaN stays a quiet NaN.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "absl/types/span.h"

namespace emberd {

// Rounds to nearest, ties to even.
inline uint16_t ToBfloat16(float value) {
  // Without a branch, so that a loop over it becomes SIMD.
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  const uint32_t quiet = bits | 0x400000;
  const bool nan = static_cast<int32_t>(bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>((nan ? quiet : rounded) >> 16);
}

// Rounds to one of the two neighbours, away from 0 with a probability that makes the mean over all
// `random` exactly `value`. What is finite stays so.
inline uint16_t ToBfloat16Randomly(float value, uint16_t random) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x7f800000) return ToBfloat16(value);
  const uint32_t rounded = std::min((magnitude + random) >> 16, 0x7f7fu);
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | rounded);
}

inline float FromBfloat16(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

// Many of them, two bytes an element, little-endian: `bytes` has 2 * values.size() bytes, at any
// alignment.
void ToBfloat16Bytes(absl::Span<const float> values, char* bytes);
void FromBfloat16Bytes(const char* bytes, absl::Span<float> values);

}  // namespace emberd
