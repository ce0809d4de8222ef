#include "shard/forward_kernel.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "shard/forward_kernel.cc"
#include "hwy/foreach_target.h"
// Must come after foreach_target.h.
#include "hwy/aligned_allocator.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "shard/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Rows ahead for which memory is asked.
constexpr int kPrefetch = 40;
static_assert(kPrefetch <= kEntryPadding);

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
    const auto bucket = hn::Mul(hn::Sub(hn::Min(hn::Max(x, lower), upper), lower), per_step);
    return hn::Add(hn::Mul(hn::Floor(hn::Add(bucket, hn::Set(D(), 0.5f))), step), lower);
  }
};

template <class D, v1::DataType kDtype, bool kQuantized>
class Forward {
 public:
  explicit Forward(const ForwardArgs& args)
      : args_(args),
        quantizer_(args),
        row_bytes_(args.width * config::WeightBytes(kDtype)),
        partials_(args.partitions > 1
                      ? hwy::AllocateAligned<float>(int64_t{args.partitions} * args.width)
                      : nullptr) {}

  void Run() {
    for (int64_t i = args_.begin; i < args_.end; ++i) {
      const Entry* begin = args_.entries + args_.offsets[i];
      const Entry* end = args_.entries + args_.offsets[i + 1];
      float* out = args_.sums + i * args_.width;
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

  // The partition of `row`, which is in partition `from` or a later one.
  HWY_INLINE int PartitionOf(uint32_t row, int from) const {
    while (row >= args_.partition_ends[from]) ++from;
    return from;
  }

  // One block of kVectors vectors of every row of a run, in registers.
  template <int kVectors, bool kFirst>
  HWY_INLINE void SumBlock(const Entry* begin, const Entry* end, size_t column,
                           float* HWY_RESTRICT out) const {
    const D d;
    hn::Vec<D> sum[kVectors];
    for (int v = 0; v < kVectors; ++v) sum[v] = hn::Zero(d);
    for (const Entry* entry = begin; entry != end; ++entry) {
      if (kFirst) PrefetchRow(args_.weights + entry[kPrefetch].row * row_bytes_, row_bytes_);
      const char* row = args_.weights + entry->row * row_bytes_;
      const auto gain = hn::Set(d, entry->gain);
      for (int v = 0; v < kVectors; ++v) {
        auto x = LoadRow<kDtype>(d, row, column + v * kLanes);
        if (kQuantized) x = quantizer_(x);
        sum[v] = hn::Add(sum[v], hn::Mul(gain, x));
      }
    }
    for (int v = 0; v < kVectors; ++v) hn::Store(sum[v], d, out + column + v * kLanes);
  }

  template <int kVectors>
  HWY_INLINE size_t SumBlocks(const Entry* begin, const Entry* end, size_t column,
                              float* out) const {
    for (; column + kVectors * kLanes <= static_cast<size_t>(args_.width);
         column += kVectors * kLanes) {
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
    const float* present[64] = {};
    float* next = partials_.get();
    int partition = 0;
    while (begin != end) {
      partition = PartitionOf(begin->row, partition);
      const uint64_t limit = args_.partition_ends[partition];
      const Entry* run_end = begin + 1;
      while (run_end != end && run_end->row < limit) ++run_end;
      SumRun(begin, run_end, next);
      present[partition] = next;
      next += args_.width;
      begin = run_end;
    }
    for (int distance = 1; distance < args_.partitions; distance *= 2) {
      for (int p = 0; p + distance < args_.partitions; p += 2 * distance) {
        if (present[p] == nullptr) {
          present[p] = present[p + distance];
        } else if (present[p + distance] != nullptr) {
          AddTo(const_cast<float*>(present[p]), present[p + distance]);
        }
      }
    }
    std::copy_n(present[0], args_.width, out);
  }

  void AddTo(float* HWY_RESTRICT sum, const float* HWY_RESTRICT other) const {
    const D d;
    for (size_t c = 0; c < static_cast<size_t>(args_.width); c += kLanes) {
      hn::Store(hn::Add(hn::Load(d, sum + c), hn::Load(d, other + c)), d, sum + c);
    }
  }

  const ForwardArgs args_;
  const Quantizer<D> quantizer_;
  const size_t row_bytes_;
  hwy::AlignedFreeUniquePtr<float[]> partials_;
};

template <class D, v1::DataType kDtype>
void SumRowsOfType(const ForwardArgs& args) {
  args.quantized ? Forward<D, kDtype, true>(args).Run() : Forward<D, kDtype, false>(args).Run();
}

template <class D>
void SumRowsOf(const ForwardArgs& args) {
  switch (args.dtype) {
    case v1::BFLOAT16:
      return SumRowsOfType<D, v1::BFLOAT16>(args);
    case v1::FLOAT16:
      return SumRowsOfType<D, v1::FLOAT16>(args);
    default:
      return SumRowsOfType<D, v1::FLOAT32>(args);
  }
}

}  // namespace

void SumRowsTarget(const ForwardArgs& args) {
  if (args.width % 16 == 0) {
    SumRowsOf<hn::CappedTag<float, 16>>(args);
  } else {
    SumRowsOf<hn::CappedTag<float, 8>>(args);
  }
}

}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace emberd::shard {
HWY_EXPORT(SumRowsTarget);
void SumRows(const ForwardArgs& args) { HWY_DYNAMIC_DISPATCH(SumRowsTarget)(args); }
}  // namespace emberd::shard
#endif
