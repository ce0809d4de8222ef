// Floats as two halves, 16 bits each. The upper half of a float32 is a bfloat16; where that is all
// of it, the lower one is zero and need not be sent.
#pragma once

#include <cstdint>

namespace emberd {

inline constexpr int64_t kHalfBytes = sizeof(uint16_t);

// Halves may lie at any alignment.

// The floats that have these upper halves, and zero as lower ones.
void FloatsOfUpperHalves(const char* halves, int64_t count, float* to);
// Adds lower halves to floats of which the upper ones are there.
void AddLowerHalves(const char* halves, int64_t count, float* to);

}  // namespace emberd
