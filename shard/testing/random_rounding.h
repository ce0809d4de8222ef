// How 16-bit weights are rounded at random, number by number: what the kernels' StoreRowRandomly
// (rows-inl.h) must do, bit for bit.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "base/floats.h"

namespace emberd::shard {

// Rounds to one of the two neighbours, away from 0 with a probability that makes the mean over all
// `random` exactly `value`. What is finite stays so.
inline uint16_t ToBfloat16Randomly(float value, uint16_t random) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x7f800000) return ToBfloat16(value);
  const uint32_t rounded = std::min((magnitude + random) >> 16, 0x7f7fu);
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | rounded);
}

// Rounds to one of the two neighbours, away from 0 with a probability that makes the mean over all
// `random` the value; exactly so from 2^-14 on, and within 2^-17 of the distance of the neighbours
// below.
inline uint16_t ToFloat16Randomly(float value, uint16_t random) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x47800000) return ToFloat16(value);  // 2^16, or NaN
  uint32_t half;
  if (magnitude < 0x38800000) {  // 2^-14: neighbours are multiples of 2^-24
    const float multiple = std::bit_cast<float>(magnitude) * 0x1p24f;
    const float down = std::floor(multiple);
    const float threshold = (static_cast<float>(random) + 0.5f) * 0x1p-16f;
    half = static_cast<uint32_t>(down) + (multiple - down > threshold ? 1 : 0);
  } else {
    half = std::min((magnitude - (112u << 23) + (random >> 3)) >> 13, uint32_t{kMaxFloat16});
  }
  return static_cast<uint16_t>(sign | half);
}

}  // namespace emberd::shard
