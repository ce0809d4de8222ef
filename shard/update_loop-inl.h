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

#include "hwy/aligned_allocator.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "shard/rows-inl.h"
#include "shard/update_kernel.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Touches ahead for which memory is asked: narrow rows pass faster than memory answers.
constexpr int TouchesAhead(int width) { return width <= 32 ? 32 : 16; }
static_assert(TouchesAhead(8) < kTouchPadding);

// Specialised for each rule:
//   static constexpr int kSlots;  // state vectors, one value per column
//   static void Step(D d, const Rule& rule, Vec g, Vec& w, Vec* slots);
// and, if it keeps one value per row (stored after the others),
//   static constexpr int kRowSlots = 1;
//   static Rule BeginRow(D d, Rule rule, const float* g, int width, int columns, float* row_slot);
template <class Rule>
struct Formula;

// For formulas without a value per row.
struct ColumnFormula {
  static constexpr int kRowSlots = 0;
  template <class D, class Rule>
  static HWY_INLINE Rule BeginRow(D, const Rule& rule, const float*, int, int, float*) {
    return rule;
  }
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
template <class D, v1::DataType kDtype, class Gradients, class Rule>
class UpdateLoop {
 public:
  UpdateLoop(const UpdateArgs& args, const Gradients& gradients, const CommonRule& common,
             const Rule& rule)
      : args_(args),
        gradients_(gradients),
        zero_(args.gradients == nullptr && args.gradient_rows == nullptr),
        common_(common),
        rule_(rule),
        row_bytes_(args.width * config::WeightBytes(kDtype)),
        gradient_(hwy::AllocateAligned<float>(args.width)) {}

  int64_t Run() {
    const Touch* touch = args_.touches;
    const Touch* const end = touch + args_.touch_count;
    int64_t rows = 0;
    for (; touch != end; ++rows) {
      const uint32_t row = touch->row;
      const Touch* row_end = touch;
      do {
        PrefetchTouch(row_end + TouchesAhead(args_.width));
        ++row_end;
      } while (row_end != end && row_end->row == row);
      while (row >= static_cast<uint64_t>(range_->end)) ++range_;
      UpdateRow(row, touch, row_end);
      touch = row_end;
    }
    return rows;
  }

 private:
  static constexpr size_t kLanes = hn::MaxLanes(D());
  static constexpr int kSlots = Formula<Rule>::kSlots;
  static constexpr int kRowSlots = Formula<Rule>::kRowSlots;

  HWY_INLINE void PrefetchTouch(const Touch* touch) const {
    if (!zero_) {
      PrefetchRow(reinterpret_cast<const char*>(gradients_(touch->sample)),
                  args_.width * sizeof(float));
    }
    if (touch->row == touch[-1].row) return;
    PrefetchRow(args_.weights + touch->row * row_bytes_, row_bytes_);
    if (kRowSlots > 0) hwy::Prefetch(args_.slots[kSlots] + touch->row);
    for (int s = 0; s < kSlots; ++s) {
      PrefetchRow(
          reinterpret_cast<const char*>(args_.slots[s] + uint64_t{touch->row} * args_.width),
          args_.width * sizeof(float));
    }
  }

  // Calls use(column, sum) for each vector of columns from `column` on that fills a block of
  // kVectors; the sums of a block are made in registers. Returns the first column not done.
  template <int kVectors, class Use>
  HWY_INLINE size_t SumBlocks(const Touch* begin, const Touch* end, size_t column, const Use& use) {
    const D d;
    for (; column + kVectors * kLanes <= static_cast<size_t>(args_.width);
         column += kVectors * kLanes) {
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
        use(column + v * kLanes, sum[v]);
      }
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

  HWY_INLINE void UpdateRow(uint32_t row, const Touch* begin, const Touch* end) {
    const D d;
    char* weights = args_.weights + row * row_bytes_;
    float* slots[kSlots + 1];
    for (int s = 0; s < kSlots; ++s) slots[s] = args_.slots[s] + uint64_t{row} * args_.width;
    if constexpr (kRowSlots == 0) {
      SumGradient(begin, end, [&](size_t c, hn::Vec<D> g) HWY_ATTR {
        UpdateVector(rule_, c, g, weights, slots);
      });
    } else {  // the whole gradient comes first
      float* gradient = gradient_.get();
      SumGradient(begin, end,
                  [&](size_t c, hn::Vec<D> g) HWY_ATTR { hn::Store(g, d, gradient + c); });
      const Rule rule = Formula<Rule>::BeginRow(d, rule_, gradient, args_.width, range_->columns,
                                                args_.slots[kSlots] + row);
      for (size_t c = 0; c < static_cast<size_t>(args_.width); c += kLanes) {
        UpdateVector(rule, c, hn::Load(d, gradient + c), weights, slots);
      }
    }
    if (range_->columns < args_.width) ClearPadding(weights, slots);
  }

  HWY_INLINE void UpdateVector(const Rule& rule, size_t c, hn::Vec<D> g, char* weights,
                               float* const* slots) const {
    const D d;
    auto w = LoadRow<kDtype>(d, weights, c);
    hn::Vec<D> state[kSlots + 1];
    for (int s = 0; s < kSlots; ++s) state[s] = hn::LoadU(d, slots[s] + c);
    if (common_.decay) w = hn::Mul(w, hn::Set(d, common_.keep));
    Formula<Rule>::Step(d, rule, g, w, state);
    if (common_.clip_weight) w = Clamp(d, w, common_.weight_min, common_.weight_max);
    StoreRow<kDtype>(d, w, weights, c);
    for (int s = 0; s < kSlots; ++s) hn::StoreU(state[s], d, slots[s] + c);
  }

  // A formula may leave padding with anything (0 / 0, a clip bound).
  void ClearPadding(char* weights, float* const* slots) const {
    const size_t element = config::WeightBytes(kDtype);
    const size_t padding = args_.width - range_->columns;
    std::memset(weights + range_->columns * element, 0, padding * element);
    for (int s = 0; s < kSlots; ++s) std::fill_n(slots[s] + range_->columns, padding, 0.0f);
  }

  const UpdateArgs args_;
  const Gradients gradients_;
  const bool zero_;  // all gradients are
  const CommonRule common_;
  const Rule rule_;
  const size_t row_bytes_;
  const RowRange* range_ = args_.ranges.data();
  hwy::AlignedFreeUniquePtr<float[]> gradient_;
};

template <class D, class Gradients, class Rule>
int64_t RunUpdateLoopOn(const Gradients& gradients, const UpdateArgs& args,
                        const CommonRule& common, const Rule& rule) {
  switch (args.dtype) {
    case v1::BFLOAT16:
      return UpdateLoop<D, v1::BFLOAT16, Gradients, Rule>(args, gradients, common, rule).Run();
    case v1::FLOAT16:
      return UpdateLoop<D, v1::FLOAT16, Gradients, Rule>(args, gradients, common, rule).Run();
    default:
      return UpdateLoop<D, v1::FLOAT32, Gradients, Rule>(args, gradients, common, rule).Run();
  }
}

template <class Rule>
int64_t RunUpdateLoop(const UpdateArgs& args, const CommonRule& common, const Rule& rule) {
  using Wide = hn::CappedTag<float, 16>;
  using Narrow = hn::CappedTag<float, 8>;
  if (args.gradient_rows != nullptr) {
    return RunUpdateLoopOn<Narrow>(GradientRows{args.gradient_rows}, args, common, rule);
  }
  const GradientArray gradients{args.gradients, static_cast<size_t>(args.width)};
  return args.width % 16 == 0 ? RunUpdateLoopOn<Wide>(gradients, args, common, rule)
                              : RunUpdateLoopOn<Narrow>(gradients, args, common, rule);
}

}  // namespace
}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
