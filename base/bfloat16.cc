#include "base/bfloat16.h"

#include <cstddef>
#include <cstring>

#include "base/simd_clones.h"

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
