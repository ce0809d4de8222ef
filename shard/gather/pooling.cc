#include "shard/gather/pooling.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "shard/gather/pooling.cc"
#include "hwy/foreach_target.h"
// Must come after foreach_target.h.
#include "hwy/aligned_allocator.h"
#include "hwy/highway.h"
#include "shard/store/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

static_assert(RowsAhead::kMost <= kEntryPadding);

// x -> floor((clamp(x) - lower) / q + 0.5) * q + lower, where 1 / q is rounded on its own: with 256
// buckets over [-1, 1] it is exact, and q is not.
template <class D>
struct Quantizer {
  hn::Vec<D> lower, upper, step, per_step;
  explicit Quantizer(const ForwardArgs& args)
      : lower(hn::Set(D(), args.lower)),
        upper(hn::Set(D(), args.upper)),
        step(hn::Set(D(), (args.upper - args.lower) / static_cast<float>(args.num_buckets - 1))),
        per_step(
            hn::Set(D(), static_cast<float>(args.num_buckets - 1) / (args.upper - args.lower))) {}
  HWY_INLINE hn::Vec<D> operator()(hn::Vec<D> x) const {
    // NaN stays NaN, on every target.
    x = hn::IfThenElse(hn::Lt(x, lower), lower, hn::IfThenElse(hn::Lt(upper, x), upper, x));
    const auto bucket = hn::Mul(hn::Sub(x, lower), per_step);
    return hn::Add(hn::Mul(hn::Floor(hn::Add(bucket, hn::Set(D(), 0.5f))), step), lower);
  }
};

// kWidth: the width of the rows, or 0 for any.
template <class D, v1::DataType kDtype, bool kQuantized, int kWidth>
class Forward {
 public:
  explicit Forward(const ForwardArgs& args)
      : args_(args),
        quantizer_(args),
        partials_(args.partitions > 1
                      ? hwy::AllocateAligned<float>(int64_t{args.partitions} * args.width)
                      : nullptr) {}

  void Run() {
    for (int64_t i = args_.begin; i < args_.end; ++i) {
      const Entry* begin = args_.entries + args_.offsets[i];
      const Entry* end = args_.entries + args_.offsets[i + 1];
      float* out = args_.rows != nullptr ? args_.rows[i] : args_.sums + i * width();
      // Rows ascend: the sample lies in one partition if its first and last entries do.
      if (args_.partitions == 1 || end - begin == 1 ||
          end[-1].row < args_.partition_ends[PartitionOf(begin->row, 0)]) {
        SumRun(begin, end, out);
      } else {
        SumPartitions(begin, end, out);
      }
    }
  }

 private:
  static constexpr size_t kLanes = hn::MaxLanes(D());

  HWY_INLINE size_t width() const { return kWidth > 0 ? kWidth : args_.width; }
  HWY_INLINE size_t row_bytes() const { return width() * config::WeightBytes(kDtype); }

  HWY_INLINE const char* Row(const Entry* entry) const {
    return args_.weights + entry->row * row_bytes();
  }

  // The partition of `row`, which is in partition `from` or a later one.
  HWY_INLINE int PartitionOf(uint32_t row, int from) const {
    while (row >= args_.partition_ends[from]) ++from;
    return from;
  }

  // A block of a row. Blocks of bfloat16 rows are loaded, and summed, with even and odd columns
  // apart; StoreBlock puts them in order.
  template <int kVectors>
  HWY_INLINE void LoadBlock(const char* row, size_t column, hn::Vec<D>* x) const {
    const D d;
#if HWY_TARGET != HWY_SCALAR
    if constexpr (kDtype == v1::BFLOAT16 && kVectors % 2 == 0) {
      for (int v = 0; v < kVectors; v += 2) LoadPair(d, row, column + v * kLanes, x[v], x[v + 1]);
      return;
    }
#endif
    for (int v = 0; v < kVectors; ++v) x[v] = LoadRow<kDtype>(d, row, column + v * kLanes);
  }

  template <int kVectors>
  HWY_INLINE void StoreBlock(const hn::Vec<D>* sum, float* out) const {
    const D d;
#if HWY_TARGET != HWY_SCALAR
    if constexpr (kDtype == v1::BFLOAT16 && kVectors % 2 == 0) {
      for (int v = 0; v < kVectors; v += 2) {
        hn::StoreInterleaved2(sum[v], sum[v + 1], d, out + v * kLanes);
      }
      return;
    }
#endif
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[v], d, out + v * kLanes);
  }

  // One block of kVectors vectors of every row of a run, in registers.
  template <int kVectors, bool kFirst>
  HWY_INLINE void SumBlock(const Entry* begin, const Entry* end, size_t column,
                           float* HWY_RESTRICT out) const {
    const D d;
    hn::Vec<D> sum[kVectors];
    for (int v = 0; v < kVectors; ++v) sum[v] = hn::Zero(d);
    for (const Entry* entry = begin; entry != end; ++entry) {
      if (kFirst) {
        PrefetchList(entry + ahead_.far);
        Prefetch<Cache::kFar>(Row(entry + ahead_.far), row_bytes());
        Prefetch<Cache::kNear>(Row(entry + ahead_.near), row_bytes());
      }
      const char* row = Row(entry);
      const auto gain = hn::Set(d, entry->gain);
      hn::Vec<D> x[kVectors];
      LoadBlock<kVectors>(row, column, x);
      for (int v = 0; v < kVectors; ++v) {
        if (kQuantized) x[v] = quantizer_(x[v]);
        sum[v] = hn::Add(sum[v], hn::Mul(gain, x[v]));
      }
    }
    StoreBlock<kVectors>(sum, out + column);
  }

  template <int kVectors>
  HWY_INLINE size_t SumBlocks(const Entry* begin, const Entry* end, size_t column,
                              float* out) const {
    for (; column + kVectors * kLanes <= width(); column += kVectors * kLanes) {
      if (column == 0) {
        SumBlock<kVectors, true>(begin, end, column, out);
      } else {
        SumBlock<kVectors, false>(begin, end, column, out);
      }
    }
    return column;
  }

  HWY_INLINE void SumRun(const Entry* begin, const Entry* end, float* out) const {
    size_t column = SumBlocks<8>(begin, end, 0, out);
    column = SumBlocks<4>(begin, end, column, out);
    column = SumBlocks<2>(begin, end, column, out);
    SumBlocks<1>(begin, end, column, out);
  }

  // Sums of each partition, then the tree: neighbours at distance 1, 2, 4, ... meet in the left
  // one.
  void SumPartitions(const Entry* begin, const Entry* end, float* out) {
    float* next = partials_.get();
    int partition = 0;
    while (begin != end) {
      partition = PartitionOf(begin->row, partition);
      const uint64_t limit = args_.partition_ends[partition];
      const Entry* run_end = begin + 1;
      while (run_end != end && run_end->row < limit) ++run_end;
      SumRun(begin, run_end, next);
      present_[partition] = next;
      next += width();
      begin = run_end;
    }
    for (int distance = 1; distance < args_.partitions; distance *= 2) {
      for (int p = 0; p + distance < args_.partitions; p += 2 * distance) {
        float* const right = std::exchange(present_[p + distance], nullptr);
        if (right == nullptr) continue;
        if (present_[p] == nullptr) {
          present_[p] = right;
        } else {
          AddTo(present_[p], right);
        }
      }
    }
    std::copy_n(std::exchange(present_[0], nullptr), width(), out);
  }

  void AddTo(float* HWY_RESTRICT sum, const float* HWY_RESTRICT other) const {
    const D d;
    for (size_t c = 0; c < width(); c += kLanes) {
      hn::Store(hn::Add(hn::Load(d, sum + c), hn::Load(d, other + c)), d, sum + c);
    }
  }

  const ForwardArgs args_;
  const RowsAhead ahead_{row_bytes()};
  const Quantizer<D> quantizer_;
  hwy::AlignedFreeUniquePtr<float[]> partials_;
  // Of the sample in hand, the sums of the partitions that have entries. Null between samples: to
  // clear all of it for each of them takes as long as reading several rows.
  float* present_[64] = {};
};

template <class D, v1::DataType kDtype, int kWidth>
void SumRowsOfType(const ForwardArgs& args) {
  if (args.quantized) {
    Forward<D, kDtype, true, 0>(args).Run();
  } else {
    Forward<D, kDtype, false, kWidth>(args).Run();
  }
}

template <class D, int kWidth>
void SumRowsOf(const ForwardArgs& args) {
  switch (args.dtype) {
    case v1::BFLOAT16:
      return SumRowsOfType<D, v1::BFLOAT16, kWidth>(args);
    case v1::FLOAT16:
      return SumRowsOfType<D, v1::FLOAT16, kWidth>(args);
    default:
      return SumRowsOfType<D, v1::FLOAT32, kWidth>(args);
  }
}

void CopyRow(const char* HWY_RESTRICT row, int64_t bytes, char* HWY_RESTRICT out) {
  const hn::CappedTag<uint8_t, 64> d;
  const hn::CappedTag<uint8_t, 16> d16;
  const auto* from = reinterpret_cast<const uint8_t*>(row);
  auto* to = reinterpret_cast<uint8_t*>(out);
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= bytes; i += lanes) hn::StoreU(hn::LoadU(d, from + i), d, to + i);
  for (; i < bytes; i += 16) hn::StoreU(hn::LoadU(d16, from + i), d16, to + i);
}

}  // namespace

void SumRowsTarget(const ForwardArgs& args) {
  using Sum = void (*)(const ForwardArgs&);
  if (args.width % 16 != 0) return SumRowsOf<hn::CappedTag<float, 8>, 0>(args);
  const Sum sum = WithWidth(args.width, []<int kWidth>(Width<kWidth>) -> Sum {
    return SumRowsOf<hn::CappedTag<float, 16>, kWidth>;
  });
  sum(args);
}

void RoundRow(const char* HWY_RESTRICT row, int64_t width, char* HWY_RESTRICT out) {
  const hn::CappedTag<float, 8> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < width; i += lanes) {
    const auto sum = hn::Add(hn::Zero(d), LoadRow<v1::FLOAT32>(d, row, i));
    StoreRow<v1::BFLOAT16>(d, sum, out, i);
  }
}

// Calls use(i, row) for each row in turn.
template <class Use>
HWY_INLINE void ForEachRow(const CopyRowsArgs& args, const Use& use) {
  const RowsAhead ahead(args.row_bytes);
  const auto row = [&args](int64_t i) {
    return args.weights + uint64_t{args.rows[std::min(i, args.count - 1)]} * args.row_bytes;
  };
  for (int64_t i = 0; i < args.count; ++i) {
    Prefetch<Cache::kFar>(row(i + ahead.far), args.row_bytes);
    Prefetch<Cache::kNear>(row(i + ahead.near), args.row_bytes);
    use(i, row(i));
  }
}

void CopyRowsTarget(const CopyRowsArgs& args) {
  ForEachRow(args, [&args](int64_t i, const char* row) {
    CopyRow(row, args.row_bytes, args.out + i * args.row_bytes);
  });
}

void CopyRoundedRowsTarget(const CopyRowsArgs& args) {
  const int64_t width = args.row_bytes / static_cast<int64_t>(sizeof(float));
  ForEachRow(args, [&args, width](int64_t i, const char* row) {
    RoundRow(row, width, args.out + i * args.row_bytes / 2);
  });
}

}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace emberd::shard {
HWY_EXPORT(SumRowsTarget);
HWY_EXPORT(CopyRowsTarget);
HWY_EXPORT(CopyRoundedRowsTarget);
void SumRows(const ForwardArgs& args) { HWY_DYNAMIC_DISPATCH(SumRowsTarget)(args); }
void CopyRows(const CopyRowsArgs& args) { HWY_DYNAMIC_DISPATCH(CopyRowsTarget)(args); }
void CopyRoundedRows(const CopyRowsArgs& args) {
  HWY_DYNAMIC_DISPATCH(CopyRoundedRowsTarget)(args);
}

namespace {

// A chunk reads about this many floats.
constexpr int64_t kChunkFloats = int64_t{1} << 20;

std::vector<int64_t> CutSamples(const StackEntries& entries, int width) {
  const int64_t per_chunk = std::max<int64_t>(1, kChunkFloats / width);
  const int64_t samples = entries.samples.size();
  std::vector<int64_t> begins = {0};
  const uint32_t* offsets = entries.offsets.data();
  while (begins.back() < samples) {
    const uint64_t target = uint64_t{offsets[begins.back()]} + per_chunk;
    const uint32_t* next =
        std::lower_bound(offsets + begins.back() + 1, offsets + samples + 1, target);
    begins.push_back(std::min<int64_t>(samples, next - offsets));
  }
  if (samples == 0) begins.push_back(0);
  return begins;
}

// All but which samples, and where their sums go.
ForwardArgs ArgsOf(const StackSpec& spec, const StackEntries& entries, const char* weights,
                   v1::DataType dtype) {
  ForwardArgs args;
  args.weights = weights;
  args.dtype = dtype;
  args.width = spec.embedding_dim;
  args.partitions = static_cast<int>(entries.partition_ends.size());
  args.partition_ends = entries.partition_ends.data();
  args.entries = entries.entries.data();
  args.offsets = entries.offsets.data();
  args.quantized = spec.quantized;
  args.lower = spec.quantization.lower();
  args.upper = spec.quantization.upper();
  args.num_buckets = spec.quantization.num_buckets();
  return args;
}

}  // namespace

absl::Status CheckSumPlaces(const SumPlaces& places, const preprocess::StackBatchView& view,
                            int64_t width) {
  const auto bad = [&](absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat("places of the sums of stack ", places.stack, ": ", what));
  };
  if (places.features.size() != view.feature_samples.size()) {
    return bad(absl::StrCat("they are of ", places.features.size(), " features; the stack has ",
                            view.feature_samples.size()));
  }
  const size_t words = (int64_t{view.sample_count} + 31) / 32;
  if (!places.passed_over.empty() && places.passed_over.size() != words) {
    return bad(absl::StrCat("passed_over has ", places.passed_over.size(), " words; must be 0 or ",
                            words));
  }
  int64_t first_sample = 0;
  for (size_t f = 0; f < places.features.size(); ++f) {
    const FeatureRows<float>& rows = places.features[f];
    if (rows.first_sample != first_sample || rows.samples != view.feature_samples[f] ||
        rows.width != width || rows.stride < width || (rows.first == nullptr && rows.samples > 0)) {
      return bad(absl::StrCat("feature ", f, " has samples ", rows.first_sample, " + ",
                              rows.samples, " of ", rows.width, " floats, ", rows.stride,
                              " apart; must be ", first_sample, " + ", view.feature_samples[f],
                              " of ", width, ", not less apart"));
    }
    first_sample += rows.samples;
  }
  return absl::OkStatus();
}

Pooling::Pooling(const StackSpec& spec, const char* weights, const StackEntries& entries,
                 BufferPool& pool, const SumPlaces* places, absl::Span<char>* room)
    : args_(ArgsOf(spec, entries, weights, spec.storage_dtype)),
      begins_(CutSamples(entries, spec.embedding_dim)) {
  const size_t samples = entries.samples.size();
  const auto returned = std::make_shared<Returned>();
  returned->samples.assign(entries.samples.data(), entries.samples.data() + samples);
  sums_.stack = entries.stack;
  sums_.samples = returned->samples;
  sums_.rows_gathered = entries.entry_count;
  sums_.owner = returned;
  if (places != nullptr) {
    FindRows(entries, *places, room, pool, returned.get());
    args_.rows = rows_.data();
  } else {
    sums_.rows = static_cast<int64_t>(samples);
    args_.sums = TakeRows(room, pool, returned.get());
  }
  args_.end = static_cast<int64_t>(samples);
}

float* Pooling::TakeRows(absl::Span<char>* room, BufferPool& pool, Returned* returned) {
  const size_t floats = sums_.rows * args_.width, bytes = floats * sizeof(float);
  float* rows = nullptr;
  if (room != nullptr && bytes > 0 && bytes <= room->size()) {
    rows = reinterpret_cast<float*>(room->data());
    room->remove_prefix(std::min(room->size(), AlignTensor(bytes)));
  } else {
    returned->sums = PooledArray<float>(pool, floats);
    rows = returned->sums.data();
  }
  sums_.sums = absl::MakeConstSpan(rows, floats);
  return rows;
}

void Pooling::FindRows(const StackEntries& entries, const SumPlaces& places, absl::Span<char>* room,
                       BufferPool& pool, Returned* returned) {
  sums_.placed = true;
  sums_.rows = std::count_if(sums_.samples.begin(), sums_.samples.end(),
                             [&](int32_t sample) { return places.PassesOver(sample); });
  float* next = TakeRows(room, pool, returned);
  rows_ = PooledArray<float*>(pool, sums_.samples.size());
  for (int64_t f = 0; f < entries.features(); ++f) {
    const FeatureRows<float>& feature = places.features[f];
    for (uint32_t i = entries.feature_offsets[f]; i < entries.feature_offsets[f + 1]; ++i) {
      const int32_t sample = sums_.samples[i];
      if (places.PassesOver(sample)) {
        rows_[i] = next;
        next += args_.width;
      } else {
        rows_[i] = feature(sample);
      }
    }
  }
}

absl::Span<const Entry> Pooling::Entries(int chunk) const {
  const uint32_t begin = args_.offsets[begins_[chunk]];
  return absl::MakeConstSpan(args_.entries + begin, args_.offsets[begins_[chunk + 1]] - begin);
}

void Pooling::Run(int chunk) const {
  ForwardArgs args = args_;
  args.begin = begins_[chunk];
  args.end = begins_[chunk + 1];
  SumRows(args);
}

absl::StatusOr<std::shared_ptr<const LaterSums>> LaterSums::Make(
    const preprocess::StackBatchView& view, const StackSpec& spec, int partitions, Rows rows,
    BufferPool& pool, CpuPool& cpu) {
  ASSIGN_OR_RETURN(StackEntries entries,
                   ArrangeForUniqueRows(view, {partitions, spec.rows_per_partition}, pool, cpu));
  if (rows.rounded && (!entries.single_rows || !MayRound(spec))) {
    return absl::InvalidArgumentError(
        absl::StrCat("stack ", spec.name, ": rounded rows, which the batch does not allow"));
  }
  const uint64_t count = entries.partition_ends.back();
  const int64_t row_bytes = rows.rounded ? RoundedRowBytes(spec) : RowBytes(spec);
  if (rows.rows.size() != count * row_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("stack ", spec.name, ": ", rows.rows.size(),
                                                   " bytes of unique rows; the batch has ", count,
                                                   " of ", row_bytes, " bytes"));
  }
  return std::shared_ptr<const LaterSums>(new LaterSums(std::move(entries), spec, rows));
}

LaterSums::LaterSums(StackEntries entries, const StackSpec& spec, Rows rows)
    : entries_(std::move(entries)),
      single_rows_(entries_.single_rows && MayRound(spec)),
      row_bytes_(rows.rounded ? RoundedRowBytes(spec) : RowBytes(spec)),
      args_(ArgsOf(spec, entries_, rows.rows.data(),
                   rows.rounded ? v1::BFLOAT16 : spec.storage_dtype)) {}

void LaterSums::Sum(int64_t begin, int64_t end, float* to) const {
  ForwardArgs args = args_;
  args.offsets = entries_.offsets.data() + begin;
  args.end = end - begin;
  args.sums = to;
  SumRows(args);
}

}  // namespace emberd::shard
#endif
