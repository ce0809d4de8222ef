#include "client/cpp/distinct_rows.h"

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/bfloat16.h"
#include "base/simd_clones.h"
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

// Sums here are those that the server would have made, whatever a trainer has set for its thread:
// many have tiny values taken for zeros.
class FloatsOfServer {
 public:
  FloatsOfServer() {
    std::fegetenv(&trainers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatsOfServer() { std::fesetenv(&trainers_); }
  FloatsOfServer(const FloatsOfServer&) = delete;
  FloatsOfServer& operator=(const FloatsOfServer&) = delete;

 private:
  std::fenv_t trainers_;
};

// Sums that begin with +0, and so are not -0.
EMBERD_SIMD_CLONES void WriteFloats(const char* row, int64_t dim, float* to) {
  for (int64_t c = 0; c < dim; ++c) {
    float value;
    std::memcpy(&value, row + c * sizeof(value), sizeof(value));
    to[c] = 0.0f + value;
  }
}

// Sums that have been rounded, perhaps to -0.
EMBERD_SIMD_CLONES void WriteBfloat16(const char* row, int64_t dim, float* to) {
  for (int64_t c = 0; c < dim; ++c) {
    uint16_t value;
    std::memcpy(&value, row + c * sizeof(value), sizeof(value));
    to[c] = FromBfloat16(value);
  }
}

// What is not finite leaves this bit in `bad`, among others that mean nothing.
constexpr uint32_t kBad = 0x80000000;

void NoteMagnitude(uint32_t magnitude, uint32_t* bad) {
  constexpr uint32_t kLeastExponent = 0x00800000;
  *bad |= magnitude + kLeastExponent;
}

void NoteIfBad(float value, uint32_t* bad) {
  NoteMagnitude(std::bit_cast<uint32_t>(value) & 0x7fffffff, bad);
}

// As ToBfloat16, of what is finite and stays so.
float Rounded(float value, uint32_t* bad) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits & 0x7fffffff) + 0x7fff + (bits >> 16 & 1);
  NoteMagnitude(rounded, bad);
  return std::bit_cast<float>((bits & 0x80000000) | (rounded & 0xffff0000));
}

// sum = sum + from, or +0 + from.
EMBERD_SIMD_CLONES void AddFloats(const float* __restrict from, bool first, int64_t dim,
                                  float* __restrict sum, uint32_t* __restrict bad) {
  uint32_t found = 0;
  for (int64_t c = 0; c < dim; ++c) {
    const float after = (first ? 0.0f : sum[c]) + from[c];
    sum[c] = after;
    NoteIfBad(after, &found);
  }
  *bad |= found;
}

// The same with `from` in bfloat16.
EMBERD_SIMD_CLONES void AddRounded(const float* __restrict from, bool first, int64_t dim,
                                   float* __restrict sum, uint32_t* __restrict bad) {
  uint32_t found = 0;
  for (int64_t c = 0; c < dim; ++c) {
    const float after = (first ? 0.0f : sum[c]) + Rounded(from[c], &found);
    sum[c] = after;
    NoteIfBad(after, &found);
  }
  *bad |= found;
}

// The upper half of +0 + from in bfloat16, which is all of it.
EMBERD_SIMD_CLONES void RoundOne(const float* __restrict from, int64_t dim,
                                 uint16_t* __restrict upper, uint32_t* __restrict bad) {
  uint32_t found = 0;
  for (int64_t c = 0; c < dim; ++c) {
    const float sum = 0.0f + Rounded(from[c], &found);
    upper[c] = static_cast<uint16_t>(std::bit_cast<uint32_t>(sum) >> 16);
  }
  *bad |= found;
}

EMBERD_SIMD_CLONES void Split(const float* __restrict sum, int64_t dim, uint16_t* __restrict upper,
                              uint16_t* __restrict lower) {
  for (int64_t c = 0; c < dim; ++c) {
    const auto bits = std::bit_cast<uint32_t>(sum[c]);
    upper[c] = static_cast<uint16_t>(bits >> 16);
    lower[c] = static_cast<uint16_t>(bits);
  }
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
  const FloatsOfServer floats_of_server;
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
  const FloatsOfServer floats;
  const int64_t stride = gradient.row_stride != 0 ? gradient.row_stride : dim;
  std::vector<uint8_t> begun(rows.rows);
  // Of every sum on its way, so that it does not matter how one ends; and of samples without a row.
  uint32_t bad = 0;
  const size_t samples = rows.index.size();
  for (size_t i = 0; i < samples; ++i) {
    const int32_t row = rows.index[i];
    const float* const from = gradient.values.data() + i * stride;
    if (row < 0) {
      for (int64_t c = 0; c < dim; ++c) NoteIfBad(from[c], &bad);
      continue;
    }
    const int32_t later = rows.index[std::min(i + kAhead, samples - 1)];
    if (later >= 0) Prefetch(sums + later * dim, dim * sizeof(float));
    const bool first = std::exchange(begun[row], 1) == 0;
    AddFloats(from, first, dim, sums + row * dim, &bad);
  }
  // The server names no row that no sample has, but nothing here depends on it.
  for (int64_t row = 0; row < rows.rows; ++row) {
    if (begun[row] == 0) std::fill_n(sums + row * dim, dim, 0.0f);
  }
  return (bad & kBad) == 0;
}

std::vector<int32_t> FindRepeated(const IndexedRows& rows) {
  std::vector<uint8_t> samples(rows.rows);  // of each row, 2 standing for more too
  for (const int32_t row : rows.index) {
    if (row >= 0) samples[row] += samples[row] < 2 ? 1 : 0;
  }
  std::vector<int32_t> repeated;
  for (int64_t row = 0; row < rows.rows; ++row) {
    if (samples[row] == 2) repeated.push_back(static_cast<int32_t>(row));
  }
  return repeated;
}

bool SumRoundedByRow(const IndexedRows& rows, absl::Span<const int32_t> repeated,
                     const FeatureGradient& gradient, int64_t dim, float* scratch,
                     uint16_t* halves) {
  const FloatsOfServer floats;
  const int64_t stride = gradient.row_stride != 0 ? gradient.row_stride : dim;
  std::vector<float*> sums(rows.rows);  // null: of one sample, or none
  for (size_t i = 0; i < repeated.size(); ++i) sums[repeated[i]] = scratch + i * dim;
  std::vector<uint8_t> begun(rows.rows);
  uint32_t bad = 0;
  for (size_t i = 0; i < rows.index.size(); ++i) {
    const int32_t row = rows.index[i];
    const float* const from = gradient.values.data() + i * stride;
    if (row < 0) {
      for (int64_t c = 0; c < dim; ++c) Rounded(from[c], &bad);
      continue;
    }
    const bool first = std::exchange(begun[row], 1) == 0;
    if (sums[row] != nullptr) {
      AddRounded(from, first, dim, sums[row], &bad);
    } else {
      RoundOne(from, dim, halves + row * dim, &bad);
    }
  }
  for (int64_t row = 0; row < rows.rows; ++row) {
    if (begun[row] == 0) std::fill_n(halves + row * dim, dim, 0);
  }
  uint16_t* lower = halves + rows.rows * dim;
  for (const int32_t row : repeated) {
    Split(sums[row], dim, halves + row * dim, std::exchange(lower, lower + dim));
  }
  return (bad & kBad) == 0;
}

}  // namespace emberd::client
