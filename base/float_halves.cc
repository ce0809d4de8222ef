#include "base/float_halves.h"

#include <bit>
#include <cstring>

#include "base/bfloat16.h"
#include "base/simd_clones.h"

namespace emberd {

EMBERD_SIMD_CLONES void FloatsOfUpperHalves(const char* halves, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, halves + i * sizeof(half), sizeof(half));
    to[i] = FromBfloat16(half);
  }
}

EMBERD_SIMD_CLONES void AddLowerHalves(const char* halves, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, halves + i * sizeof(half), sizeof(half));
    to[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(to[i]) | half);
  }
}

}  // namespace emberd
