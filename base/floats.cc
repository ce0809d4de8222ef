#include "base/floats.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

// Before a function: it is compiled for several generations of CPUs, and the loader takes the one
// that fits. Its bits are the same in each, for nothing is contracted. What it calls must be
// inlined, and its library needs emberd_optimise. Not by clang: its sanitizers are not ready when
// the loader asks.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EMBERD_SIMD_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EMBERD_SIMD_CLONES
#endif

namespace emberd {

EMBERD_SIMD_CLONES void ToBfloat16Bytes(absl::Span<const float> values, char* bytes) {
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = ToBfloat16(values[i]);
    std::memcpy(bytes + 2 * i, &half, sizeof(half));
  }
}

EMBERD_SIMD_CLONES void FromBfloat16Bytes(const char* bytes, absl::Span<float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t half;
    std::memcpy(&half, bytes + 2 * i, sizeof(half));
    values[i] = FromBfloat16(half);
  }
}

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
