// bfloat16: the upper half of a float32.
#pragma once

#include <bit>
#include <cstdint>

#include "absl/types/span.h"

namespace emberd::client {

// Rounded to nearest, ties to even; beyond the largest finite value, infinity. A NaN stays a NaN.
inline uint16_t ToBfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Exact.
inline float FromBfloat16(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

// Two bytes an element, little-endian; `bytes` has 2 * values.size() bytes, at any alignment.
void ToBfloat16Bytes(absl::Span<const float> values, char* bytes);
void FromBfloat16Bytes(const char* bytes, absl::Span<float> values);

}  // namespace emberd::client
