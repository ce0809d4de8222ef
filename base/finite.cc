#include "base/finite.h"

#include <algorithm>
#include <cstring>

#include "base/simd_clones.h"

namespace emberd {
namespace {

// Of values whose exponent bits are `exponent`.
template <typename Bits>
inline __attribute__((always_inline)) int64_t FindNonFiniteBits(const char* data, int64_t size,
                                                                Bits exponent) {
  const auto is_bad = [data, exponent](int64_t i) {
    Bits bits;
    std::memcpy(&bits, data + i * sizeof(Bits), sizeof(Bits));
    return (bits & exponent) == exponent;
  };
  // A block is searched only if it has one: a loop without a way out becomes SIMD.
  constexpr int64_t kBlock = 4096;
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, size);
    Bits any = 0;
    for (int64_t i = begin; i < end; ++i) any = static_cast<Bits>(any | (is_bad(i) ? 1 : 0));
    if (any == 0) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (is_bad(i)) return i;
    }
  }
  return -1;
}

}  // namespace

EMBERD_SIMD_CLONES int64_t FindNonFiniteFloat32(const char* data, int64_t size) {
  return FindNonFiniteBits<uint32_t>(data, size, 0x7f800000);
}

EMBERD_SIMD_CLONES int64_t FindNonFiniteBfloat16(const char* data, int64_t size) {
  return FindNonFiniteBits<uint16_t>(data, size, 0x7f80);
}

}  // namespace emberd
