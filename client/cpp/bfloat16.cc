#include "client/cpp/bfloat16.h"

#include <cstring>

namespace emberd::client {

static_assert(std::endian::native == std::endian::little, "tensors travel in memory order");

void ToBfloat16Bytes(absl::Span<const float> values, char* bytes) {
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = ToBfloat16(values[i]);
    std::memcpy(bytes + 2 * i, &half, sizeof(half));
  }
}

void FromBfloat16Bytes(const char* bytes, absl::Span<float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t half;
    std::memcpy(&half, bytes + 2 * i, sizeof(half));
    values[i] = FromBfloat16(half);
  }
}

}  // namespace emberd::client
