// The walk over touched rows that all optimizers share. Included once per SIMD target.
//
// An optimizer is a specialisation of Formula: how many slots it has, and its step on one vector of
// columns.
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
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "shard/counter_random.h"
#include "shard/rows-inl.h"
#include "shard/update_kernel.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Touches ahead for which memory is asked, by the cache lines that one takes: few of them pass
// faster than memory answers, many would push each other out.
constexpr int TouchesAhead(size_t lines) { return lines <= 6 ? 60 : 16; }
static_assert(TouchesAhead(1) < kTouchPadding);

// Specialised for each rule:
//   static constexpr int kSlots;  // state vectors, one value per column
//   static void Step(D d, const Rule& rule, Vec g, Vec& w, Vec* slots);
// and, if it keeps one value per row (stored after the others),
//   static constexpr int kRowSlots = 1;
//   static float RowSum(const float* g, size_t width);  // what the value needs of the gradient
//   static void BeginRows(const Rule& rule, RowValues& rows);
//   static Rule OfRow(Rule rule, float factor);  // the rule for one row
template <class Rule>
struct Formula;

// For formulas without a value per row.
struct ColumnFormula {
  static constexpr int kRowSlots = 0;
};

// Rows whose values are updated together, so that roots and quotients of several are under way.
constexpr int kRowsAtOnce = 8;
struct RowValues {
  HWY_ALIGN float sums[kRowsAtOnce];     // RowSum
  HWY_ALIGN float columns[kRowsAtOnce];  // live columns, at least 1
  HWY_ALIGN float values[kRowsAtOnce];   // of the slot
  HWY_ALIGN float factors[kRowsAtOnce];  // for OfRow
};

// n / d, and 0 where d is 0.
template <class D, class V>
HWY_INLINE V DivOrZero(D d, V numerator, V denominator) {
  return hn::IfThenZeroElse(hn::Eq(denominator, hn::Zero(d)), hn::Div(numerator, denominator));
}

// NaN stays NaN, on every target.
template <class D, class V>
HWY_INLINE V Clamp(D d, V x, float low, float high) {
  const auto l = hn::Set(d, low);
  const auto h = hn::Set(d, high);
  return hn::IfThenElse(hn::Lt(x, l), l, hn::IfThenElse(hn::Lt(h, x), h, x));
}

// Where the gradient of a sample lies.
struct GradientArray {
  const float* first;
  size_t width;
  HWY_INLINE const float* operator()(uint32_t sample) const {
    return first + uint64_t{sample} * width;
  }
};
struct AnyGradients {
  const float* const* rows;  // null: they lie in the array
  GradientArray array;
  HWY_INLINE const float* operator()(uint32_t sample) const {
    return rows != nullptr ? rows[sample] : array(sample);
  }
};

// Gradients: one of the two above. An array stands for a plain pass, which updates every row,
// rounds to nearest, and updates columns while their sums are in registers. Any other pass sums a
// whole row first.
template <class D, v1::DataType kDtype, int kWidth, class Gradients, class Rule>
class UpdateLoop {
 public:
  UpdateLoop(const UpdateArgs& args, const Gradients& gradients, const CommonRule& common,
             const Rule& rule)
      : args_(args),
        gradients_(gradients),
        zero_(args.gradients == nullptr && args.gradient_rows == nullptr),
        common_(common),
        rule_(rule),
        batch_(kPlain && kRowSlots == 0 ? nullptr
                                        : hwy::AllocateAligned<float>(kRowsAtOnce * args.width)),
        random_(kPlain ? nullptr : hwy::AllocateAligned<uint16_t>(args.width)) {}

  UpdateCounts Run() {
    const Touch* touch = args_.touches;
    const Touch* const end = touch + args_.touch_count;
    while (touch != end) {
      if constexpr (kRowSlots == 0) {
        const Touch* row_end = EndOfRow(touch, end);
        UpdateRow(touch, row_end);
        touch = row_end;
      } else {
        UpdateSomeRows(touch, end);
      }
    }
    return counts_;
  }

 private:
  static constexpr size_t kLanes = hn::MaxLanes(D());
  static constexpr int kSlots = Formula<Rule>::kSlots;
  static constexpr int kRowSlots = Formula<Rule>::kRowSlots;
  static constexpr bool kPlain = std::is_same_v<Gradients, GradientArray>;
  static constexpr bool kMayRoundRandomly = !kPlain && kDtype != v1::FLOAT32;

  HWY_INLINE size_t width() const { return kWidth > 0 ? kWidth : args_.width; }
  HWY_INLINE size_t row_bytes() const { return width() * config::WeightBytes(kDtype); }

  HWY_INLINE int Ahead() const {
    return TouchesAhead(((1 + kSlots) * width() * sizeof(float) + row_bytes()) / 64);
  }

  // Asks for the memory of later touches on the way. Finds the range of the row, too.
  HWY_INLINE const Touch* EndOfRow(const Touch* touch, const Touch* end) {
    const uint32_t row = touch->row;
    do {
      const Touch* later = touch + Ahead();
      PrefetchGradient(later);
      if (kRowSlots == 0) PrefetchState(later);
      if (kRowSlots > 0) hwy::Prefetch(args_.slots[kSlots] + later->row);
      ++touch;
    } while (touch != end && touch->row == row);
    while (row >= static_cast<uint64_t>(range_->end)) ++range_;
    return touch;
  }

  HWY_INLINE void PrefetchGradient(const Touch* touch) const {
    if (zero_) return;
    PrefetchRow(reinterpret_cast<const char*>(gradients_(touch->sample)), width() * sizeof(float));
  }

  HWY_INLINE void PrefetchState(const Touch* touch) const {
    if (touch->row == touch[-1].row) return;
    PrefetchRow(args_.weights + touch->row * row_bytes(), row_bytes());
    for (int s = 0; s < kSlots; ++s) {
      PrefetchRow(reinterpret_cast<const char*>(args_.slots[s] + uint64_t{touch->row} * width()),
                  width() * sizeof(float));
    }
  }

  // Calls use(column, sums) for each block of kVectors vectors of columns from `column` on; the
  // sums of a block are made in registers. Returns the first column not done.
  template <int kVectors, class Use>
  HWY_INLINE size_t SumBlocks(const Touch* begin, const Touch* end, size_t column, const Use& use) {
    const D d;
    for (; column + kVectors * kLanes <= width(); column += kVectors * kLanes) {
      hn::Vec<D> sum[kVectors];
      for (int v = 0; v < kVectors; ++v) sum[v] = hn::Zero(d);
      for (const Touch* touch = begin; touch != end; ++touch) {
        const float* gradient = gradients_(touch->sample) + column;
        const auto gain = hn::Set(d, touch->gain);
        for (int v = 0; v < kVectors; ++v) {
          sum[v] = hn::Add(sum[v], hn::Mul(gain, hn::LoadU(d, gradient + v * kLanes)));
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (!kPlain) finite_ &= AllFinite(sum[v]);
        if (common_.clip_gradient) {
          sum[v] = Clamp(d, sum[v], common_.gradient_min, common_.gradient_max);
        }
      }
      use(column, sum);
    }
    return column;
  }

  template <class Use>
  HWY_INLINE void SumGradient(const Touch* begin, const Touch* end, const Use& use) {
    if (zero_) end = begin;
    size_t column = SumBlocks<8>(begin, end, 0, use);
    column = SumBlocks<4>(begin, end, column, use);
    column = SumBlocks<2>(begin, end, column, use);
    SumBlocks<1>(begin, end, column, use);
  }

  static HWY_INLINE bool AllFinite(hn::Vec<D> x) {
    const hn::Repartition<uint32_t, D> d32;
    const auto exponent = hn::Set(d32, 0x7f800000);
    return hn::AllTrue(d32, hn::Ne(hn::And(hn::BitCast(d32, x), exponent), exponent));
  }

  // Sums the gradient of a row. False if the row is to be left as it is, which is then counted.
  HWY_INLINE bool SumWholeGradient(const Touch* begin, const Touch* end, float* gradient) {
    const D d;
    finite_ = true;
    SumGradient(begin, end, [&](size_t c, const auto& g) HWY_ATTR {
      for (const auto& v : g) hn::Store(v, d, gradient + c), c += kLanes;
    });
    const bool update = kPlain || finite_ || !args_.skip_nonfinite;
    ++(update ? counts_.updated : counts_.skipped);
    return update;
  }

  HWY_INLINE void UpdateRow(const Touch* begin, const Touch* end) {
    if constexpr (kPlain) {
      char* weights = args_.weights + begin->row * row_bytes();
      float* slots[kSlots + 1];
      FindSlots(begin->row, slots);
      SumGradient(begin, end, [&](size_t c, const auto& g) HWY_ATTR {
        UpdateBlock<std::extent_v<std::remove_reference_t<decltype(g)>>>(rule_, c, g, weights,
                                                                         slots);
      });
      if (range_->columns < static_cast<int>(width()))
        ClearPadding(range_->columns, weights, slots);
      ++counts_.updated;
    } else if (SumWholeGradient(begin, end, batch_.get())) {
      UpdateColumns(rule_, begin->row, batch_.get(), range_->columns);
    }
  }

  // First the gradients of up to kRowsAtOnce rows, then their values, then their columns. Moves
  // `touch` beyond them.
  HWY_INLINE void UpdateSomeRows(const Touch*& touch, const Touch* end) {
    RowValues values{};  // the last batch may not fill it
    const Touch* begins[kRowsAtOnce + 1];
    float* const row_slots = args_.slots[kSlots];
    int count = 0;
    for (; count < kRowsAtOnce && touch != end; ++count) {
      begins[count] = touch;
      const Touch* row_end = EndOfRow(touch, end);
      float* gradient = batch_.get() + count * width();
      update_[count] = SumWholeGradient(touch, row_end, gradient);
      touch = row_end;
      values.sums[count] = Formula<Rule>::RowSum(gradient, width());
      values.columns[count] = static_cast<float>(std::max(range_->columns, 1));
      values.values[count] = row_slots[begins[count]->row];
      columns_[count] = range_->columns;
    }
    begins[count] = touch;
    Formula<Rule>::BeginRows(rule_, values);
    for (int i = 0; i < count; ++i) {
      // Asked for here and not on the way to the row's end, to spread what memory is asked for.
      for (const Touch* t = begins[i]; t != begins[i + 1]; ++t) {
        PrefetchState(t + Ahead());
      }
      if (!kPlain && !update_[i]) continue;
      const uint32_t row = begins[i]->row;
      row_slots[row] = values.values[i];
      UpdateColumns(Formula<Rule>::OfRow(rule_, values.factors[i]), row, batch_.get() + i * width(),
                    columns_[i]);
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
  const Gradients gradients_;
  const bool zero_;  // all gradients are
  const CommonRule common_;
  const Rule rule_;
  const RowRange* range_ = args_.ranges.data();
  UpdateCounts counts_;
  bool finite_ = true;                        // the sums of the row so far
  hwy::AlignedFreeUniquePtr<float[]> batch_;  // gradients of kRowsAtOnce rows
  int columns_[kRowsAtOnce];
  bool update_[kRowsAtOnce];
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

template <class Rule>
UpdateCounts RunUpdateLoop(const UpdateArgs& args, const CommonRule& common, const Rule& rule) {
  using Wide = hn::CappedTag<float, 16>;
  using Narrow = hn::CappedTag<float, 8>;
  const GradientArray gradients{args.gradients, static_cast<size_t>(args.width)};
  if (args.gradient_rows != nullptr || args.skip_nonfinite || args.stochastic_rounding) {
    const AnyGradients any{args.gradient_rows, gradients};
    return RunUpdateLoopOn<Narrow, 0>(any, args, common, rule);
  }
  if constexpr (std::is_same_v<Rule, AdagradRule> || std::is_same_v<Rule, RowwiseAdagradRule>) {
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

}  // namespace
}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
