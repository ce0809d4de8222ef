#include "base/bfloat16.h"

#include <cstddef>
#include <cstring>

// Before a function: it is compiled for several generations of CPUs, and the loader takes the one
// that fits. Its bits are the same in each, for nothing is contracted. What it calls must be
// inlined. Sanitizers are not ready yet when the loader asks.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
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

}  // namespace emberd
