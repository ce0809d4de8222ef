// Floats as bytes: in 16 bits, as bfloat16 or float16, and whether those from outside are finite.
// Many of them pass at the speed of memory.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "absl/types/span.h"

namespace emberd {

// bfloat16 is the upper half of a float32. NaN stays a quiet NaN.

// Rounds to nearest, ties to even.
inline uint16_t ToBfloat16(float value) {
  // Without a branch, so that a loop over it becomes SIMD.
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  const uint32_t quiet = bits | 0x400000;
  const bool nan = static_cast<int32_t>(bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>((nan ? quiet : rounded) >> 16);
}

inline float FromBfloat16(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

// Many of them, two bytes an element, little-endian: `bytes` has 2 * values.size() bytes, at any
// alignment.
void ToBfloat16Bytes(absl::Span<const float> values, char* bytes);
void FromBfloat16Bytes(const char* bytes, absl::Span<float> values);

// float16: IEEE 754 binary16, largest finite value 65504. What lies beyond it, infinity too,
// becomes that value with its sign, so that one large update does not make a row useless for good.
// NaN stays a quiet NaN.
inline constexpr uint16_t kMaxFloat16 = 0x7bff;

// Rounds to nearest, ties to even.
inline uint16_t ToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x47800000) {  // 2^16
    half = kMaxFloat16;
  } else if (magnitude < 0x38800000) {  // 2^-14: the addition rounds to a multiple of 2^-24
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) -
           std::bit_cast<uint32_t>(0.5f);
  } else {
    half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    if (half > kMaxFloat16) half = kMaxFloat16;
  }
  return static_cast<uint16_t>(sign | half);
}

inline float FromFloat16(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value & 0x7fff) << 13;
  const uint32_t exponent = value & 0x7c00;
  float result;
  if (exponent == 0) {  // a multiple of 2^-24
    result = std::bit_cast<float>(magnitude + (113u << 23)) - 0x1p-14f;
  } else {
    result = std::bit_cast<float>(magnitude + ((exponent == 0x7c00 ? 224u : 112u) << 23));
  }
  return std::bit_cast<float>(std::bit_cast<uint32_t>(result) | sign);
}

// Index of the first NaN or infinity among `size` little-endian values, at any alignment; -1 if all
// are finite.
int64_t FindNonFiniteFloat32(const char* data, int64_t size);
int64_t FindNonFiniteBfloat16(const char* data, int64_t size);
inline int64_t FindNonFinite(absl::Span<const float> values) {
  return FindNonFiniteFloat32(reinterpret_cast<const char*>(values.data()),
                              static_cast<int64_t>(values.size()));
}

}  // namespace emberd
