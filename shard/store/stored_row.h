// Rows of weights as they are stored: float32, bfloat16 or float16. Plain loops, for what is not a
// kernel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "absl/types/span.h"
#include "base/bfloat16.h"
#include "base/float16.h"
#include "emberd/v1/types.pb.h"

namespace emberd::shard {

// Writes the first values.size() columns of `row`.
inline void WriteStoredRow(v1::DataType dtype, absl::Span<const float> values, char* row) {
  auto* halves = reinterpret_cast<uint16_t*>(row);
  if (dtype == v1::BFLOAT16) {
    std::transform(values.begin(), values.end(), halves, ToBfloat16);
  } else if (dtype == v1::FLOAT16) {
    std::transform(values.begin(), values.end(), halves, ToFloat16);
  } else {
    std::memcpy(row, values.data(), values.size() * sizeof(float));
  }
}

// Reads the first values.size() columns of `row`.
inline void ReadStoredRow(v1::DataType dtype, const char* row, absl::Span<float> values) {
  const auto* halves = reinterpret_cast<const uint16_t*>(row);
  if (dtype == v1::BFLOAT16) {
    std::transform(halves, halves + values.size(), values.begin(), FromBfloat16);
  } else if (dtype == v1::FLOAT16) {
    std::transform(halves, halves + values.size(), values.begin(), FromFloat16);
  } else {
    std::memcpy(values.data(), row, values.size() * sizeof(float));
  }
}

}  // namespace emberd::shard
