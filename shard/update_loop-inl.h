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
struct GradientRows {
  const float* const* rows;
  HWY_INLINE const float* operator()(uint32_t sample) const { return rows[sample]; }
};

// Gradients: one of the two above.
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
        batch_(kRowSlots > 0 ? hwy::AllocateAligned<float>(kRowsAtOnce * args.width) : nullptr) {}

  int64_t Run() {
    const Touch* touch = args_.touches;
    const Touch* const end = touch + args_.touch_count;
    int64_t rows = 0;
    while (touch != end) {
      if constexpr (kRowSlots == 0) {
        const Touch* row_end = EndOfRow(touch, end);
        UpdateRow(touch, row_end);
        touch = row_end;
        ++rows;
      } else {
        rows += UpdateSomeRows(touch, end);
      }
    }
    return rows;
  }

 private:
  static constexpr size_t kLanes = hn::MaxLanes(D());
  static constexpr int kSlots = Formula<Rule>::kSlots;
  static constexpr int kRowSlots = Formula<Rule>::kRowSlots;

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

  HWY_INLINE void UpdateRow(const Touch* begin, const Touch* end) {
    char* weights = args_.weights + begin->row * row_bytes();
    float* slots[kSlots + 1];
    FindSlots(begin->row, slots);
    SumGradient(begin, end, [&](size_t c, const auto& g) HWY_ATTR {
      UpdateBlock<std::extent_v<std::remove_reference_t<decltype(g)>>>(rule_, c, g, weights, slots);
    });
    if (range_->columns < static_cast<int>(width())) ClearPadding(range_->columns, weights, slots);
  }

  // First the gradients of up to kRowsAtOnce rows, then their values, then their columns. Moves
  // `touch` beyond them and returns how many they are.
  HWY_INLINE int UpdateSomeRows(const Touch*& touch, const Touch* end) {
    const D d;
    RowValues values{};  // the last batch may not fill it
    const Touch* begins[kRowsAtOnce + 1];
    float* const row_slots = args_.slots[kSlots];
    int count = 0;
    for (; count < kRowsAtOnce && touch != end; ++count) {
      begins[count] = touch;
      const Touch* row_end = EndOfRow(touch, end);
      float* gradient = batch_.get() + count * width();
      SumGradient(touch, row_end, [&](size_t c, const auto& g) HWY_ATTR {
        for (const auto& v : g) hn::Store(v, d, gradient + c), c += kLanes;
      });
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
      const uint32_t row = begins[i]->row;
      row_slots[row] = values.values[i];
      const Rule rule = Formula<Rule>::OfRow(rule_, values.factors[i]);
      char* weights = args_.weights + row * row_bytes();
      float* slots[kSlots + 1];
      FindSlots(row, slots);
      const float* gradient = batch_.get() + i * width();
      size_t c = 0;
      for (; c + 2 * kLanes <= width(); c += 2 * kLanes) {
        const hn::Vec<D> g[2] = {hn::Load(d, gradient + c), hn::Load(d, gradient + c + kLanes)};
        UpdateBlock<2>(rule, c, g, weights, slots);
      }
      if (c < width()) {
        const hn::Vec<D> g[1] = {hn::Load(d, gradient + c)};
        UpdateBlock<1>(rule, c, g, weights, slots);
      }
      if (columns_[i] < static_cast<int>(width())) ClearPadding(columns_[i], weights, slots);
    }
    return count;
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
  hwy::AlignedFreeUniquePtr<float[]> batch_;  // gradients of kRowsAtOnce rows
  int columns_[kRowsAtOnce];
};

template <class D, int kWidth, class Gradients, class Rule>
int64_t RunUpdateLoopOn(const Gradients& gradients, const UpdateArgs& args,
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
int64_t RunUpdateLoop(const UpdateArgs& args, const CommonRule& common, const Rule& rule) {
  using Wide = hn::CappedTag<float, 16>;
  using Narrow = hn::CappedTag<float, 8>;
  if (args.gradient_rows != nullptr) {
    return RunUpdateLoopOn<Narrow, 0>(GradientRows{args.gradient_rows}, args, common, rule);
  }
  const GradientArray gradients{args.gradients, static_cast<size_t>(args.width)};
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
