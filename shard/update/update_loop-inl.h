// The walk over touched rows that all optimizers share. Included once per SIMD target.
#if defined(EMBERD_SHARD_UPDATE_LOOP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EMBERD_SHARD_UPDATE_LOOP_INL_H_
#undef EMBERD_SHARD_UPDATE_LOOP_INL_H_
#else
#define EMBERD_SHARD_UPDATE_LOOP_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "hwy/aligned_allocator.h"
#include "hwy/highway.h"
#include "shard/optimizers/formula-inl.h"
#include "shard/store/portable_numbers.h"
#include "shard/store/rows-inl.h"
#include "shard/update/update_kernel.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Further ahead than gradients, the places of gradients are asked for.
constexpr size_t kPlacesAhead = 16;
static_assert(RowsAhead::kMost + kPlacesAhead < kTouchPadding);

// Where the gradient of a sample lies.
struct GradientArray {
  const float* first;
  size_t width;  // 0: all samples have the first one
  HWY_INLINE const float* operator()(uint32_t sample) const {
    return first + uint64_t{sample} * width;
  }
  HWY_INLINE void PrefetchPlace(uint32_t) const {}
};
struct GradientRows {
  const float* const* rows;
  HWY_INLINE const float* operator()(uint32_t sample) const { return rows[sample]; }
  HWY_INLINE void PrefetchPlace(uint32_t sample) const { __builtin_prefetch(rows + sample); }
};
struct AnyGradients {
  const float* const* rows;  // null: they lie in the array
  GradientArray array;
  HWY_INLINE const float* operator()(uint32_t sample) const {
    return rows != nullptr ? rows[sample] : array(sample);
  }
  HWY_INLINE void PrefetchPlace(uint32_t) const {}
};

// Gradients: one of the three above. An array, or rows, stand for a plain pass, which updates every
// row, rounds to nearest, and updates columns while their sums are in registers. Any other pass
// sums a whole row first.
template <class D, v1::DataType kDtype, int kWidth, class Gradients, class Rule>
class UpdateLoop {
 public:
  UpdateLoop(const UpdateArgs& args, const Gradients& gradients, const CommonRule& common,
             const Rule& rule)
      : args_(args),
        gradients_(gradients),
        common_(common),
        rule_(rule),
        stride_((width() + 15) / 16 * 16),
        batch_(kBatchRows == 0 ? nullptr : hwy::AllocateAligned<float>(kBatchRows * stride_)),
        random_(kPlain ? nullptr : hwy::AllocateAligned<uint16_t>(args.width)) {
    if (kBatchRows > 0) std::fill_n(batch_.get(), kBatchRows * stride_, 0.0f);
  }

  UpdateCounts Run() {
    const Touch* touch = args_.touches;
    const Touch* const end = touch + args_.touch_count;
    if constexpr (kRowSlots > 0) {
      UpdateInBatches(touch, end);
    } else {
      while (touch != end) touch = UpdateRow(touch, end);
    }
    return counts_;
  }

 private:
  static constexpr size_t kLanes = hn::MaxLanes(D());
  static constexpr int kSlots = Formula<Rule>::kSlots;
  static constexpr int kRowSlots = Formula<Rule>::kRowSlots;
  static constexpr bool kPlain = !std::is_same_v<Gradients, AnyGradients>;
  static constexpr bool kMayRoundRandomly = !kPlain && kDtype != v1::FLOAT32;

  // Whole gradients that are kept at a time: none where columns are updated as they are summed.
  static constexpr int kBatchRows = kRowSlots > 0 ? 2 * kRowsAtOnce : kPlain ? 0 : 1;

  struct RowBatch {
    int count;
    float* gradients;
    uint32_t rows[kRowsAtOnce];
    int columns[kRowsAtOnce];
    RowValues values;
  };

  HWY_INLINE size_t width() const { return kWidth > 0 ? kWidth : args_.width; }
  HWY_INLINE size_t row_bytes() const { return width() * config::WeightBytes(kDtype); }

  // Of memory that a touch takes.
  HWY_INLINE size_t touch_bytes() const {
    return (1 + kSlots) * width() * sizeof(float) + row_bytes();
  }

  template <Cache kCache>
  HWY_INLINE void PrefetchGradient(const Touch* touch) const {
    Prefetch<kCache>(gradients_(touch->sample), width() * sizeof(float));
  }

  template <Cache kCache>
  HWY_INLINE void PrefetchState(size_t row) const {
    Prefetch<kCache>(args_.weights + row * row_bytes(), row_bytes());
    for (int s = 0; s < kSlots; ++s) {
      Prefetch<kCache>(args_.slots[s] + row * width(), width() * sizeof(float));
    }
  }

  // Asks for the memory of later touches. Rows with values are asked for into the first level when
  // their gradients have been summed: it is longer until they are updated.
  HWY_INLINE void PrefetchLater(const Touch* touch) const {
    const Touch* far = touch + ahead_.far;
    const Touch* near = touch + ahead_.near;
    PrefetchList(far);
    gradients_.PrefetchPlace(far[kPlacesAhead].sample);
    PrefetchGradient<Cache::kFar>(far);
    PrefetchGradient<Cache::kNear>(near);
    if (far->row != far[-1].row) {
      PrefetchState<Cache::kFar>(far->row);
      if (kRowSlots > 0) Prefetch<Cache::kFar>(args_.slots[kSlots] + far->row, sizeof(float));
    }
    if (kRowSlots == 0 && near->row != near[-1].row) PrefetchState<Cache::kNear>(near->row);
  }

  // Rows may lie in memory that others can write to: what was checked there may have changed since,
  // and what is not finite now is taken for zero.
  HWY_INLINE bool MayHaveChanged() const {
    if constexpr (std::is_same_v<Gradients, GradientArray>) return false;
    return args_.gradient_rows != nullptr && !args_.skip_nonfinite;
  }

  // Calls use(column, sums) with the sums of one block of kVectors vectors of columns, which are
  // made in registers. The first block of a row finds where the row ends, and asks for the memory
  // of later touches on the way.
  template <int kVectors, bool kFirst, class Use>
  HWY_INLINE const Touch* SumBlock(const Touch* touch, const Touch* end, size_t column,
                                   const Use& use) {
    const D d;
    const Touch* const begin = touch;
    const uint32_t row = touch->row;
    hn::Vec<D> running[kVectors];  // apart from `sum`, so that it stays in registers
    for (int v = 0; v < kVectors; ++v) running[v] = hn::Zero(d);
    do {
      if (kFirst) PrefetchLater(touch);
      const float* gradient = gradients_(touch->sample) + column;
      const auto gain = hn::Set(d, touch->gain);
      for (int v = 0; v < kVectors; ++v) {
        running[v] = hn::Add(running[v], hn::Mul(gain, hn::LoadU(d, gradient + v * kLanes)));
      }
      ++touch;
    } while (touch != end && (!kFirst || touch->row == row));
    hn::Vec<D> sum[kVectors];
    for (int v = 0; v < kVectors; ++v) sum[v] = running[v];
    if (MayHaveChanged() && !AllFinite<kVectors>(sum)) {
      SumFinite<kVectors>(begin, touch, column, sum);
    }
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (!kPlain) finite_ &= AllFinite<1>(sum + v);
      if (common_.clip_gradient) {
        sum[v] = Clamp(d, sum[v], common_.gradient_min, common_.gradient_max);
      }
    }
    use(column, sum);
    return touch;
  }

  // The sums of one block again, with zero for what is not finite. No sum is finite with such a
  // gradient in it.
  template <int kVectors>
  HWY_NOINLINE void SumFinite(const Touch* touch, const Touch* end, size_t column,
                              hn::Vec<D>* sum) const {
    const D d;
    for (int v = 0; v < kVectors; ++v) sum[v] = hn::Zero(d);
    for (; touch != end; ++touch) {
      const float* gradient = gradients_(touch->sample) + column;
      const auto gain = hn::Set(d, touch->gain);
      for (int v = 0; v < kVectors; ++v) {
        const auto value = hn::LoadU(d, gradient + v * kLanes);
        const auto finite = hn::IfThenElseZero(hn::IsFinite(value), value);
        sum[v] = hn::Add(sum[v], hn::Mul(gain, finite));
      }
    }
  }

  template <int kVectors, class Use>
  HWY_INLINE size_t SumBlocks(const Touch* begin, const Touch*& end, size_t column,
                              const Use& use) {
    for (; column + kVectors * kLanes <= width(); column += kVectors * kLanes) {
      if (column == 0) {
        end = SumBlock<kVectors, true>(begin, end, column, use);
      } else {
        SumBlock<kVectors, false>(begin, end, column, use);
      }
    }
    return column;
  }

  // The gradient of the row at `begin`, block by block. Returns the row's end.
  template <class Use>
  HWY_INLINE const Touch* SumGradient(const Touch* begin, const Touch* end, const Use& use) {
    size_t column = SumBlocks<8>(begin, end, 0, use);
    column = SumBlocks<4>(begin, end, column, use);
    column = SumBlocks<2>(begin, end, column, use);
    SumBlocks<1>(begin, end, column, use);
    return end;
  }

  // x - x is 0 if x is finite, and otherwise NaN, as any sum with it is.
  template <int kVectors>
  static HWY_INLINE bool AllFinite(const hn::Vec<D>* x) {
    const D d;
    auto zero = hn::Sub(x[0], x[0]);
    for (int v = 1; v < kVectors; ++v) zero = hn::Add(zero, hn::Sub(x[v], x[v]));
    return hn::AllTrue(d, hn::Eq(zero, zero));
  }

  // The live columns of a row; rows ascend.
  HWY_INLINE int ColumnsOf(uint32_t row) {
    while (row >= static_cast<uint64_t>(range_->end)) ++range_;
    return range_->columns;
  }

  // Sums the gradient of the row at `touch` and moves `touch` beyond it. False if the row is to be
  // left as it is, which is then counted.
  HWY_INLINE bool SumWholeGradient(const Touch*& touch, const Touch* end, float* gradient) {
    const D d;
    finite_ = true;
    touch = SumGradient(touch, end, [&](size_t c, const auto& g) HWY_ATTR {
      for (const auto& v : g) hn::Store(v, d, gradient + c), c += kLanes;
    });
    const bool update = kPlain || finite_ || !args_.skip_nonfinite;
    ++(update ? counts_.updated : counts_.skipped);
    return update;
  }

  // Updates the row at `touch`. Returns its end.
  HWY_INLINE const Touch* UpdateRow(const Touch* touch, const Touch* end) {
    const uint32_t row = touch->row;
    const int columns = ColumnsOf(row);
    if constexpr (kPlain) {
      char* weights = args_.weights + row * row_bytes();
      float* slots[kSlots + 1];
      FindSlots(row, slots);
      touch = SumGradient(touch, end, [&](size_t c, const auto& g) HWY_ATTR {
        UpdateBlock<std::extent_v<std::remove_reference_t<decltype(g)>>>(rule_, c, g, weights,
                                                                         slots);
      });
      if (columns < static_cast<int>(width())) ClearPadding(columns, weights, slots);
      ++counts_.updated;
    } else if (SumWholeGradient(touch, end, batch_.get())) {
      UpdateColumns(rule_, row, batch_.get(), columns);
    }
    return touch;
  }

  // Sums the gradients of the next rows that are to be updated. Moves `touch` beyond them.
  HWY_INLINE void SumSomeRows(const Touch*& touch, const Touch* end, RowBatch& batch) {
    batch.count = 0;
    while (batch.count < kRowsAtOnce && touch != end) {
      const uint32_t row = touch->row;
      float* gradient = batch.gradients + batch.count * stride_;
      if (!SumWholeGradient(touch, end, gradient)) continue;
      const int columns = ColumnsOf(row);
      // Clipping may have made padding anything.
      if (columns < static_cast<int>(width())) {
        std::fill(gradient + columns, gradient + width(), 0.0f);
      }
      batch.rows[batch.count] = row;
      batch.columns[batch.count] = columns;
      batch.values.sums[batch.count] = Formula<Rule>::RowSum(gradient, width());
      batch.values.columns[batch.count] = static_cast<float>(std::max(columns, 1));
      batch.values.values[batch.count] = args_.slots[kSlots][row];
      ++batch.count;
    }
  }

  HWY_INLINE void UpdateSomeRows(RowBatch& batch, const RowBatch& next) {
    Formula<Rule>::BeginRows(rule_, batch.values);
    for (int i = 0; i < batch.count; ++i) {
      if (i < next.count) PrefetchState<Cache::kNear>(next.rows[i]);
      args_.slots[kSlots][batch.rows[i]] = batch.values.values[i];
      UpdateColumns(Formula<Rule>::OfRow(rule_, batch.values.factors[i]), batch.rows[i],
                    batch.gradients + i * stride_, batch.columns[i]);
    }
  }

  // Rows with values: those of a batch are updated when the gradients of the next one have been
  // summed, since what was just written one by one is slow to read as a vector.
  HWY_INLINE void UpdateInBatches(const Touch* touch, const Touch* end) {
    RowBatch batches[2] = {};
    batches[0].gradients = batch_.get();
    batches[1].gradients = batch_.get() + kRowsAtOnce * stride_;
    int next = 0;
    SumSomeRows(touch, end, batches[next]);
    while (batches[next].count > 0) {
      next = 1 - next;
      SumSomeRows(touch, end, batches[next]);
      UpdateSomeRows(batches[1 - next], batches[next]);
    }
  }

  // Updates a row, of which `columns` are live, from its whole gradient.
  HWY_INLINE void UpdateColumns(const Rule& rule, uint32_t row, const float* gradient,
                                int columns) {
    const D d;
    char* weights = args_.weights + row * row_bytes();
    float* slots[kSlots + 1];
    FindSlots(row, slots);
    if (kMayRoundRandomly && args_.stochastic_rounding) {
      RandomHalves(SubKey(args_.rounding_key, row), static_cast<int>(width()), random_.get());
    }
    size_t c = 0;
    for (; c + 2 * kLanes <= width(); c += 2 * kLanes) {
      const hn::Vec<D> g[2] = {hn::Load(d, gradient + c), hn::Load(d, gradient + c + kLanes)};
      UpdateBlock<2>(rule, c, g, weights, slots);
    }
    if (c < width()) {
      const hn::Vec<D> g[1] = {hn::Load(d, gradient + c)};
      UpdateBlock<1>(rule, c, g, weights, slots);
    }
    if (columns < static_cast<int>(width())) ClearPadding(columns, weights, slots);
  }

  HWY_INLINE void FindSlots(uint32_t row, float** slots) const {
    for (int s = 0; s < kSlots; ++s) slots[s] = args_.slots[s] + uint64_t{row} * width();
  }

  template <int kVectors>
  HWY_INLINE void UpdateBlock(const Rule& rule, size_t column, const hn::Vec<D>* g, char* weights,
                              float* const* slots) const {
    const D d;
    hn::Vec<D> w[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const size_t c = column + v * kLanes;
      w[v] = LoadRow<kDtype>(d, weights, c);
      hn::Vec<D> state[kSlots + 1];
      for (int s = 0; s < kSlots; ++s) state[s] = hn::LoadU(d, slots[s] + c);
      if (common_.decay) w[v] = hn::Mul(w[v], hn::Set(d, common_.keep));
      Formula<Rule>::Step(d, rule, g[v], w[v], state);
      if (common_.clip_weight) w[v] = Clamp(d, w[v], common_.weight_min, common_.weight_max);
      for (int s = 0; s < kSlots; ++s) hn::StoreU(state[s], d, slots[s] + c);
    }
    StoreBlock<kVectors>(w, weights, column);
  }

  template <int kVectors>
  HWY_INLINE void StoreBlock(const hn::Vec<D>* w, char* weights, size_t column) const {
    const D d;
    if constexpr (kMayRoundRandomly) {
      if (args_.stochastic_rounding) {
        for (int v = 0; v < kVectors; ++v) {
          const size_t c = column + v * kLanes;
          StoreRowRandomly<kDtype>(d, w[v], random_.get() + c, weights, c);
        }
        return;
      }
    }
#if HWY_TARGET != HWY_SCALAR
    if constexpr (kDtype == v1::BFLOAT16 && kVectors % 2 == 0) {
      for (int v = 0; v < kVectors; v += 2) {
        StorePair(d, w[v], w[v + 1], weights, column + v * kLanes);
      }
      return;
    }
#endif
    for (int v = 0; v < kVectors; ++v) StoreRow<kDtype>(d, w[v], weights, column + v * kLanes);
  }

  // A formula may leave padding with anything (0 / 0, a clip bound).
  void ClearPadding(int columns, char* weights, float* const* slots) const {
    const size_t element = config::WeightBytes(kDtype);
    const size_t padding = width() - columns;
    std::memset(weights + columns * element, 0, padding * element);
    for (int s = 0; s < kSlots; ++s) std::fill_n(slots[s] + columns, padding, 0.0f);
  }

  const UpdateArgs args_;
  const RowsAhead ahead_{touch_bytes()};
  const Gradients gradients_;
  const CommonRule common_;
  const Rule rule_;
  const RowRange* range_ = args_.ranges.data();
  UpdateCounts counts_;
  bool finite_ = true;                            // the sums of the row so far
  const size_t stride_;                           // from one gradient in batch_ to the next
  hwy::AlignedFreeUniquePtr<float[]> batch_;      // gradients of kRowsAtOnce rows
  hwy::AlignedFreeUniquePtr<uint16_t[]> random_;  // of the row's columns
};

template <class D, int kWidth, class Gradients, class Rule>
UpdateCounts RunUpdateLoopOn(const Gradients& gradients, const UpdateArgs& args,
                             const CommonRule& common, const Rule& rule) {
  switch (args.dtype) {
    case v1::BFLOAT16:
      return UpdateLoop<D, v1::BFLOAT16, kWidth, Gradients, Rule>(args, gradients, common, rule)
          .Run();
    case v1::FLOAT16:
      return UpdateLoop<D, v1::FLOAT16, kWidth, Gradients, Rule>(args, gradients, common, rule)
          .Run();
    default:
      return UpdateLoop<D, v1::FLOAT32, kWidth, Gradients, Rule>(args, gradients, common, rule)
          .Run();
  }
}

// Of an array, the widths that matter most have a loop of their own.
template <class Gradients, class Rule>
UpdateCounts RunPlainLoop(const Gradients& gradients, const UpdateArgs& args,
                          const CommonRule& common, const Rule& rule) {
  using Wide = hn::CappedTag<float, 16>;
  using Narrow = hn::CappedTag<float, 8>;
  if constexpr (std::is_same_v<Gradients, GradientArray> &&
                (std::is_same_v<Rule, AdagradRule> || std::is_same_v<Rule, RowwiseAdagradRule>)) {
    switch (args.width) {
      case 16:
        return RunUpdateLoopOn<Wide, 16>(gradients, args, common, rule);
      case 32:
        return RunUpdateLoopOn<Wide, 32>(gradients, args, common, rule);
      case 64:
        return RunUpdateLoopOn<Wide, 64>(gradients, args, common, rule);
      case 128:
        return RunUpdateLoopOn<Wide, 128>(gradients, args, common, rule);
    }
  }
  return args.width % 16 == 0 ? RunUpdateLoopOn<Wide, 0>(gradients, args, common, rule)
                              : RunUpdateLoopOn<Narrow, 0>(gradients, args, common, rule);
}

template <class Rule>
UpdateCounts RunUpdateLoop(const UpdateArgs& args, const CommonRule& common, const Rule& rule) {
  const size_t width = args.width;
  hwy::AlignedFreeUniquePtr<float[]> zeros;
  GradientArray gradients{args.gradients, width};
  if (args.gradients == nullptr && args.gradient_rows == nullptr) {
    zeros = hwy::AllocateAligned<float>(width);
    std::fill_n(zeros.get(), width, 0.0f);
    gradients = {zeros.get(), 0};
  }
  if (args.skip_nonfinite || args.stochastic_rounding) {
    const AnyGradients any{args.gradient_rows, gradients};
    return RunUpdateLoopOn<hn::CappedTag<float, 8>, 0>(any, args, common, rule);
  }
  if (args.gradient_rows != nullptr) {
    return RunPlainLoop(GradientRows{args.gradient_rows}, args, common, rule);
  }
  return RunPlainLoop(gradients, args, common, rule);
}

}  // namespace
}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
