// Whether values from outside are finite, checked at the speed of memory.
#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace emberd {

// Index of the first NaN or infinity among `size` little-endian values, at any alignment; -1 if all
// are finite.
int64_t FindNonFiniteFloat32(const char* data, int64_t size);
int64_t FindNonFiniteBfloat16(const char* data, int64_t size);
inline int64_t FindNonFinite(absl::Span<const float> values) {
  return FindNonFiniteFloat32(reinterpret_cast<const char*>(values.data()),
                              static_cast<int64_t>(values.size()));
}

}  // namespace emberd
