#include "shard/gather/tensor_kernels.h"

#include <algorithm>
#include <cstring>

#include "base/floats.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "shard/gather/tensor_kernels.cc"
#include "hwy/foreach_target.h"
// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "shard/store/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using Wide = hn::CappedTag<float, 16>;

// Sums are asked for this many entries ahead, gradients so many samples: of a feature's samples
// others may lie on other shards, and the hardware does not see a stride.
constexpr int64_t kSumsAhead = 12;
constexpr int64_t kGradientsAhead = 8;
static_assert(kSumsAhead <= kEntryPadding);

// Rows are asked for so many samples ahead: they lie anywhere in what a shard has sent.
constexpr int64_t kRowsAhead = 8;

template <v1::DataType kDtype>
HWY_INLINE float ElementAt(const char* row, size_t column) {
  if constexpr (kDtype == v1::FLOAT32) {
    float value;
    std::memcpy(&value, row + column * sizeof(value), sizeof(value));
    return value;
  } else {
    uint16_t value;
    std::memcpy(&value, row + column * sizeof(value), sizeof(value));
    return FromBfloat16(value);
  }
}

// +0 + row, as kDtype.
template <v1::DataType kDtype>
HWY_INLINE void WriteSum(const char* HWY_RESTRICT row, int64_t dim, char* HWY_RESTRICT out) {
  const Wide d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t c = 0;
  for (; c + lanes <= dim; c += lanes) {
    const auto sum = hn::Add(hn::Zero(d), LoadRow<v1::FLOAT32>(d, row, c));
    StoreRow<kDtype>(d, sum, out, c);
  }
  for (; c < dim; ++c) {
    const float sum = 0.0f + ElementAt<v1::FLOAT32>(row, c);
    if constexpr (kDtype == v1::FLOAT32) {
      std::memcpy(out + c * sizeof(sum), &sum, sizeof(sum));
    } else {
      const uint16_t half = ToBfloat16(sum);
      std::memcpy(out + c * sizeof(half), &half, sizeof(half));
    }
  }
}

template <class Write>
HWY_INLINE void WriteSingleRows(const SingleRowsArgs& args, const Write& write) {
  const size_t row_bytes = args.dim * config::WeightBytes(args.row_dtype);
  const size_t out_bytes = args.dim * config::WeightBytes(args.dtype);
  char* out = args.out;
  for (int64_t i = 0; i < args.count; ++i, out += args.stride) {
    Prefetch<Cache::kNear>(args.rows[std::min(i + kRowsAhead, args.count - 1)], row_bytes);
    if (args.rows[i] == nullptr) {
      std::memset(out, 0, out_bytes);
    } else {
      write(args.rows[i], out);
    }
  }
}

// The greatest values that were seen, as bits without a sign: these ascend as values do, and beyond
// them come infinity and NaN.
struct Greatest {
  hn::Vec<hn::RebindToSigned<Wide>> lanes;
  int32_t rest;  // of columns that fill no vector
};

HWY_INLINE bool AreFinite(const Greatest& greatest) {
  constexpr int32_t kInfinity = 0x7f800000;
  const hn::RebindToSigned<Wide> d;
  return greatest.rest < kInfinity && hn::AllTrue(d, hn::Lt(greatest.lanes, hn::Set(d, kInfinity)));
}

template <v1::DataType kDtype, bool kFirst>
HWY_INLINE void AddGradient(const char* HWY_RESTRICT gradient, size_t dim, size_t width, float gain,
                            float* HWY_RESTRICT sum, Greatest& greatest) {
  const Wide d;
  const hn::RebindToSigned<Wide> bits;
  constexpr int32_t kWithoutSign = 0x7fffffff;
  const size_t lanes = hn::Lanes(d);
  const auto gains = hn::Set(d, gain);
  size_t c = 0;
  for (; c + lanes <= dim; c += lanes) {
    const auto before = kFirst ? hn::Zero(d) : hn::LoadU(d, sum + c);
    const auto after = hn::Add(before, hn::Mul(gains, LoadRow<kDtype>(d, gradient, c)));
    hn::StoreU(after, d, sum + c);
    const auto size = hn::And(hn::BitCast(bits, after), hn::Set(bits, kWithoutSign));
    greatest.lanes = hn::Max(greatest.lanes, size);
  }
  for (; c < dim; ++c) {
    sum[c] = (kFirst ? 0.0f : sum[c]) + gain * ElementAt<kDtype>(gradient, c);
    int32_t size;
    std::memcpy(&size, sum + c, sizeof(size));
    greatest.rest = std::max(greatest.rest, size & kWithoutSign);
  }
  if (kFirst && c < width) std::fill(sum + c, sum + width, 0.0f);
}

template <v1::DataType kDtype>
bool AddAll(const RowSumArgs& args) {
  const size_t row_bytes = args.dim * (kDtype == v1::FLOAT32 ? sizeof(float) : sizeof(uint16_t));
  const auto gradient_of = [&](int64_t i) {
    return args.gradients + (args.samples[i] - args.first_sample) * row_bytes;
  };
  Greatest greatest = {hn::Zero(hn::RebindToSigned<Wide>()), 0};
  for (int64_t i = args.begin; i < args.end; ++i) {
    Prefetch<Cache::kNear>(gradient_of(std::min(i + kGradientsAhead, args.end - 1)), row_bytes);
    const char* gradient = gradient_of(i);
    for (uint32_t e = args.offsets[i]; e < args.offsets[i + 1]; ++e) {
      const Entry& entry = args.entries[e];
      const uint32_t later = args.entries[e + kSumsAhead].row;
      Prefetch<Cache::kNear>(args.sums + later * args.width, args.width * sizeof(float));
      float* sum = args.sums + entry.row * args.width;
      if (args.begun[entry.row] != 0) {
        AddGradient<kDtype, false>(gradient, args.dim, args.width, entry.gain, sum, greatest);
      } else {
        args.begun[entry.row] = 1;
        AddGradient<kDtype, true>(gradient, args.dim, args.width, entry.gain, sum, greatest);
      }
    }
  }
  return AreFinite(greatest);
}

}  // namespace

bool AddToRowSumsTarget(const RowSumArgs& args) {
  return args.dtype == v1::FLOAT32 ? AddAll<v1::FLOAT32>(args) : AddAll<v1::BFLOAT16>(args);
}

void CopySingleRowsTarget(const SingleRowsArgs& args) {
  if (args.row_dtype == v1::BFLOAT16) {
    WriteSingleRows(args, [&args](const char* row, char* out) {
      std::memcpy(out, row, args.dim * sizeof(uint16_t));
    });
  } else if (args.dtype == v1::BFLOAT16) {
    WriteSingleRows(
        args, [&args](const char* row, char* out) { WriteSum<v1::BFLOAT16>(row, args.dim, out); });
  } else {
    WriteSingleRows(
        args, [&args](const char* row, char* out) { WriteSum<v1::FLOAT32>(row, args.dim, out); });
  }
}

void RoundToBfloat16Target(const float* values, int64_t count, char* out) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const Wide d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    StorePair(d, hn::LoadU(d, values + i), hn::LoadU(d, values + i + lanes), out, i);
  }
#endif
  for (; i < count; ++i) {
    const uint16_t half = ToBfloat16(values[i]);
    std::memcpy(out + i * sizeof(half), &half, sizeof(half));
  }
}

}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace emberd::shard {
HWY_EXPORT(AddToRowSumsTarget);
HWY_EXPORT(CopySingleRowsTarget);
HWY_EXPORT(RoundToBfloat16Target);
bool AddToRowSums(const RowSumArgs& args) { return HWY_DYNAMIC_DISPATCH(AddToRowSumsTarget)(args); }
void CopySingleRows(const SingleRowsArgs& args) {
  HWY_DYNAMIC_DISPATCH(CopySingleRowsTarget)(args);
}
void RoundToBfloat16(const float* values, int64_t count, char* out) {
  HWY_DYNAMIC_DISPATCH(RoundToBfloat16Target)(values, count, out);
}
}  // namespace emberd::shard
#endif
