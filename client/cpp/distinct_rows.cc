#include "client/cpp/distinct_rows.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/bfloat16.h"
#include "client/cpp/tensor_codec.h"

namespace emberd::client {
namespace {

// Samples whose rows are fetched ahead.
constexpr size_t kAhead = 8;

void Prefetch(const void* address, size_t bytes) {
  constexpr size_t kCacheLine = 64;
  const auto* const begin = static_cast<const char*>(address);
  for (size_t offset = 0; offset < bytes; offset += kCacheLine) {
    __builtin_prefetch(begin + offset);
  }
}

// Sums that begin with +0, and so are not -0.
void WriteFloats(const char* row, int64_t dim, float* to) {
  for (int64_t c = 0; c < dim; ++c) {
    float value;
    std::memcpy(&value, row + c * sizeof(value), sizeof(value));
    to[c] = 0.0f + value;
  }
}

// Sums that have been rounded, perhaps to -0.
void WriteBfloat16(const char* row, int64_t dim, float* to) {
  for (int64_t c = 0; c < dim; ++c) {
    uint16_t value;
    std::memcpy(&value, row + c * sizeof(value), sizeof(value));
    to[c] = FromBfloat16(value);
  }
}

// 1 if it is not finite.
uint32_t IsBad(float value) {
  constexpr uint32_t kExponent = 0x7f800000;
  return (std::bit_cast<uint32_t>(value) & kExponent) == kExponent ? 1 : 0;
}

// sum = sum + from, or +0 + from. Not 0 if a sum is not finite. Without a branch, so that it
// becomes SIMD.
template <bool kFirst>
uint32_t Add(const float* __restrict from, int64_t dim, float* __restrict sum) {
  uint32_t bad = 0;
  for (int64_t c = 0; c < dim; ++c) {
    const float after = (kFirst ? 0.0f : sum[c]) + from[c];
    sum[c] = after;
    bad |= IsBad(after);
  }
  return bad;
}

}  // namespace

absl::Status CheckIndex(const IndexedRows& rows) {
  for (size_t i = 0; i < rows.index.size(); ++i) {
    if (rows.index[i] >= -1 && rows.index[i] < rows.rows) continue;
    return absl::InternalError(absl::StrCat("row_index: the server sent ", rows.index[i],
                                            " for sample ", i, "; it must be in [-1, ", rows.rows,
                                            ")"));
  }
  return absl::OkStatus();
}

void SpreadRows(const IndexedRows& rows, absl::Span<const char* const> values, WireType type,
                int64_t dim, int64_t stride, float* to) {
  const bool floats = type == WireType::kFloat32;
  const size_t samples = rows.index.size();
  for (size_t i = 0; i < samples; ++i, to += stride) {
    const int32_t later = rows.index[std::min(i + kAhead, samples - 1)];
    if (later >= 0) Prefetch(values[later], dim * ElementBytes(type));
    if (rows.index[i] < 0) {
      std::fill_n(to, dim, 0.0f);
    } else if (floats) {
      WriteFloats(values[rows.index[i]], dim, to);
    } else {
      WriteBfloat16(values[rows.index[i]], dim, to);
    }
  }
}

bool SumByRow(const IndexedRows& rows, const FeatureGradient& gradient, int64_t dim, float* sums) {
  const int64_t stride = gradient.row_stride != 0 ? gradient.row_stride : dim;
  std::vector<uint8_t> begun(rows.rows);
  // Not 0: a sum was not finite, and does not become so again; or the gradient of a sample without
  // a row is not.
  uint32_t bad = 0;
  const size_t samples = rows.index.size();
  for (size_t i = 0; i < samples; ++i) {
    const int32_t row = rows.index[i];
    const float* const from = gradient.values.data() + i * stride;
    if (row < 0) {
      for (int64_t c = 0; c < dim; ++c) bad |= IsBad(from[c]);
      continue;
    }
    float* const sum = sums + row * dim;
    const int32_t later = rows.index[std::min(i + kAhead, samples - 1)];
    if (later >= 0) Prefetch(sums + later * dim, dim * sizeof(float));
    if (begun[row] == 0) {
      begun[row] = 1;
      bad |= Add</*kFirst=*/true>(from, dim, sum);
    } else {
      bad |= Add</*kFirst=*/false>(from, dim, sum);
    }
  }
  // The server names no row that no sample has, but nothing here depends on it.
  for (int64_t row = 0; row < rows.rows; ++row) {
    if (begun[row] == 0) std::fill_n(sums + row * dim, dim, 0.0f);
  }
  return bad == 0;
}

}  // namespace emberd::client
