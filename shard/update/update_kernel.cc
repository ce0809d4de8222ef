#include "shard/update/update_kernel.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <type_traits>
#include <variant>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "shard/update/update_kernel.cc"
#include "hwy/foreach_target.h"
// Must come after foreach_target.h.
#include "hwy/aligned_allocator.h"
#include "hwy/highway.h"
#include "shard/optimizers/custom_rule.h"
#include "shard/optimizers/formulas-inl.h"
#include "shard/store/portable_numbers.h"
#include "shard/store/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;
using Wide = hn::CappedTag<float, 16>;
using Narrow = hn::CappedTag<float, 8>;

// Further ahead than gradients, the places of gradients are asked for.
constexpr size_t kPlacesAhead = 16;
static_assert(RowsAhead::kMost + kPlacesAhead < kTouchPadding);
// Of gradients and state that one batch of rows takes: two of them fit into the first level of
// cache.
constexpr size_t kBatchBytes = size_t{12} << 10;
constexpr int kMostRows = std::max<int>(kRowsAtOnce, kRuleBlock / 8);  // of 8 columns or more

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

// What rows have beside their gradients.
struct RowState {
  char* weights;
  float* slots[kMaxSlots + 1];
  size_t width, weight_bytes;  // of a row, of a weight
  int slot_count;              // slots with a value per column
  bool has_value;              // the slot after them has one per row

  // Of memory that a touch takes.
  constexpr size_t TouchBytes() const {
    return width * (sizeof(float) * (1 + slot_count) + weight_bytes);
  }
  HWY_INLINE char* Weights(size_t row) const { return weights + row * width * weight_bytes; }
};

// Asks for a row's state, but for its value into the second level only: it is read soon. kWidth as
// in GradientSums.
template <Cache kCache, int kWidth>
HWY_INLINE void PrefetchState(const RowState& state, size_t row) {
  const size_t width = kWidth > 0 ? kWidth : state.width;
  if (state.weight_bytes == 2) {
    Prefetch<kCache>(state.weights + row * width * 2, width * 2);
  } else {
    Prefetch<kCache>(state.weights + row * width * 4, width * 4);
  }
  for (int s = 0; s < state.slot_count; ++s) {
    Prefetch<kCache>(state.slots[s] + row * width, width * sizeof(float));
  }
  if (kCache == Cache::kFar && state.has_value) {
    Prefetch<kCache>(state.slots[state.slot_count] + row, sizeof(float));
  }
}

// Rows on their way from the sums of their gradients to the rule.
struct RowBatch {
  int count = 0;
  float* gradients;  // one every `stride` floats; zeros from `columns` on
  char* weights[kMostRows];
  uint32_t rows[kMostRows];
  int columns[kMostRows];  // live ones
  RowValues values = {};
};

// One call of UpdateRows.
struct UpdatePass {
  const UpdateArgs& args;
  const StepRule& step;
  const size_t width = args.width;
  size_t stride = (width + 15) / 16 * 16;
  RowState state = {};
  RowsAhead ahead{1};
  int rows_at_once = 0;
  const float* zeros = nullptr;  // a gradient, where there are none
  const RowRange* range = args.ranges.data();
  UpdateCounts counts = {};
  CustomRun* custom = nullptr;  // a user's rule

  // The live columns of a row; rows ascend.
  int ColumnsOf(uint32_t row) {
    while (row >= static_cast<uint64_t>(range->end)) ++range;
    return range->columns;
  }
};

// x - x is 0 if x is finite, and otherwise NaN, as any sum with it is.
template <int kVectors, class D>
HWY_INLINE bool AllFinite(D d, const hn::Vec<D>* x) {
  auto zero = hn::Sub(x[0], x[0]);
  for (int v = 1; v < kVectors; ++v) zero = hn::Add(zero, hn::Sub(x[v], x[v]));
  return hn::AllTrue(d, hn::Eq(zero, zero));
}

// The sums of one vector of columns again, with zero for what is not finite. No sum is finite with
// such a gradient in it.
template <class D, class Gradients>
HWY_NOINLINE void SumFinite(D d, Gradients gradients, const Touch* touch, const Touch* end,
                            size_t column, float* out) {
  auto sum = hn::Zero(d);
  for (; touch != end; ++touch) {
    const auto value = hn::LoadU(d, gradients(touch->sample) + column);
    const auto finite = hn::IfThenElseZero(hn::IsFinite(value), value);
    sum = hn::Add(sum, hn::Mul(hn::Set(d, touch->gain), finite));
  }
  hn::Store(sum, d, out);
}

// Sums gradients, row after row. kWidth: the width of the rows, or 0 for any. kPlain: they lie in
// an array, and no row is skipped.
template <class D, int kWidth, class Gradients, bool kPlain = false>
class GradientSums {
 public:
  GradientSums(UpdatePass& pass, const RowState& state, RowsAhead ahead, Gradients gradients)
      : pass_(pass), state_(state), ahead_(ahead), gradients_(gradients) {}

  // Sums the gradients of the next rows that are to be updated, and calls summed(gradient, i) for
  // each. Returns where the rows after them begin.
  template <class Summed>
  HWY_INLINE const Touch* SumSomeRows(const Touch* touch, RowBatch& batch, const Summed& summed) {
    const D d;
    const Touch* const end = pass_.args.touches + pass_.args.touch_count;
    int count = 0;
    while (count < pass_.rows_at_once && touch != end) {
      const uint32_t row = touch->row;
      batch.rows[count] = row;
      batch.columns[count] = pass_.ColumnsOf(row);
      batch.weights[count] = state_.Weights(row);
      float* gradient = batch.gradients + count * (kWidth > 0 ? kWidth : pass_.stride);
      finite_ = true;
      touch = SumRow(touch, end, [&](size_t column, const auto& sums) HWY_ATTR {
#pragma GCC unroll 8
        for (const auto& sum : sums) hn::Store(sum, d, gradient + column), column += kLanes;
      });
      if (!finite_) {
        ++pass_.counts.skipped;
        continue;
      }
      // Clipping may have made padding anything.
      if (batch.columns[count] < static_cast<int>(width())) {
        std::fill(gradient + batch.columns[count], gradient + width(), 0.0f);
      }
      summed(gradient, count++);
    }
    batch.count = count;
    pass_.counts.updated += count;
    return touch;
  }

  // Sums the gradient of the row at `begin`, and calls use(column, sums) block by block. Returns
  // the row's end.
  template <class Use>
  HWY_INLINE const Touch* SumRow(const Touch* begin, const Touch* end, const Use& use) {
    size_t column = SumBlocks<8>(begin, end, 0, use);
    column = SumBlocks<4>(begin, end, column, use);
    column = SumBlocks<2>(begin, end, column, use);
    SumBlocks<1>(begin, end, column, use);
    return end;
  }

 private:
  static constexpr size_t kLanes = hn::MaxLanes(D());

  HWY_INLINE size_t width() const { return kWidth > 0 ? kWidth : pass_.width; }

  template <Cache kCache>
  HWY_INLINE void PrefetchGradient(const Touch* touch) const {
    Prefetch<kCache>(gradients_(touch->sample), width() * sizeof(float));
  }

  // Asks for the memory of later touches. The state of rows that are not updated at once is asked
  // for into the first level when the batch before theirs is updated.
  HWY_INLINE void PrefetchLater(const Touch* touch) const {
    const Touch* far = touch + ahead_.far;
    const Touch* near = touch + ahead_.near;
    PrefetchList(far);
    gradients_.PrefetchPlace(far[kPlacesAhead].sample);
    PrefetchGradient<Cache::kFar>(far);
    PrefetchGradient<Cache::kNear>(near);
    if (far->row != far[-1].row) PrefetchState<Cache::kFar, kWidth>(state_, far->row);
    if (at_once_ && near->row != near[-1].row) {
      PrefetchState<Cache::kNear, kWidth>(state_, near->row);
    }
  }

  // Sums one block of kVectors vectors of columns in registers. The first block of a row finds
  // where the row ends, and asks for the memory of later touches on the way.
  template <int kVectors, bool kFirst, class Use>
  HWY_INLINE const Touch* SumBlock(const Touch* touch, const Touch* end, size_t column,
                                   const Use& use) {
    const D d;
    const Touch* const begin = touch;
    const uint32_t row = touch->row;
    hn::Vec<D> sum[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] = hn::Zero(d);
    do {
      if (kFirst) PrefetchLater(touch);
      const float* gradient = gradients_(touch->sample) + column;
      const auto gain = hn::Set(d, touch->gain);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[v] = hn::Add(sum[v], hn::Mul(gain, hn::LoadU(d, gradient + v * kLanes)));
      }
      ++touch;
    } while (touch != end && (!kFirst || touch->row == row));
    // Rows may lie in memory that others can write to: what was checked there may have changed
    // since, and what is not finite now is taken for zero.
    if (!kPlain && check_ && !AllFinite<kVectors>(d, sum)) {
      finite_ = !skip_;
      for (int v = 0; !skip_ && v < kVectors; ++v) {
        HWY_ALIGN float finite[kLanes];
        SumFinite(d, gradients_, begin, touch, column + v * kLanes, finite);
        sum[v] = hn::Load(d, finite);
      }
    }
    if (common_.clip_gradient) {
      for (int v = 0; v < kVectors; ++v) {
        sum[v] = Clamp(d, sum[v], common_.gradient_min, common_.gradient_max);
      }
    }
    use(column, sum);
    return touch;
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

  UpdatePass& pass_;
  const RowState state_;
  const RowsAhead ahead_;
  const Gradients gradients_;
  const CommonRule common_ = pass_.step.common;
  const bool at_once_ = kPlain ? !state_.has_value : pass_.custom != nullptr;
  const bool skip_ = pass_.args.skip_nonfinite;
  const bool check_ = skip_ || pass_.args.gradient_rows != nullptr;
  bool finite_ = true;  // the sums of the row so far, or rows are not skipped
};

using SumSomeRows = const Touch* (*)(UpdatePass&, const Touch*, RowBatch&);

template <class D, int kWidth>
const Touch* SumFromArray(UpdatePass& pass, const Touch* touch, RowBatch& batch) {
  GradientArray array{pass.args.gradients, pass.width};
  if (pass.zeros != nullptr) array = {pass.zeros, 0};
  return GradientSums<D, kWidth, GradientArray>(pass, pass.state, pass.ahead, array)
      .SumSomeRows(touch, batch, [](auto...) {});
}

template <class D>
const Touch* SumFromRows(UpdatePass& pass, const Touch* touch, RowBatch& batch) {
  const GradientRows rows{pass.args.gradient_rows};
  return GradientSums<D, 0, GradientRows>(pass, pass.state, pass.ahead, rows)
      .SumSomeRows(touch, batch, [](auto...) {});
}

SumSomeRows SumsOf(const UpdateArgs& args) {
  const bool narrow = args.width % 16 != 0;
  if (args.gradient_rows != nullptr) return narrow ? SumFromRows<Narrow> : SumFromRows<Wide>;
  if (narrow) return SumFromArray<Narrow, 0>;
  return WithWidth(args.width, []<int kWidth>(Width<kWidth>) -> SumSomeRows {
    return SumFromArray<Wide, kWidth>;
  });
}

// A formula may leave padding with anything (0 / 0, a clip bound).
template <v1::DataType kDtype>
void ClearPadding(const UpdatePass& pass, uint32_t row, int columns, char* weights) {
  const size_t element = config::WeightBytes(kDtype), padding = pass.width - columns;
  std::memset(weights + columns * element, 0, padding * element);
  for (int s = 0; s < pass.state.slot_count; ++s) {
    std::fill_n(pass.args.slots[s] + row * pass.width + columns, padding, 0.0f);
  }
}

// Updates rows from their gradients. kWidth as in GradientSums.
template <class Rule, v1::DataType kDtype, int kWidth>
class RowUpdates {
 public:
  RowUpdates(const UpdatePass& pass, const RowState& state) : pass_(pass), state_(state) {}

  // Reads the value of a row whose gradient has been summed.
  HWY_INLINE void ReadValue(const float* gradient, int i, RowBatch& batch) const {
    if constexpr (kRowSlots > 0) {
      batch.values.sums[i] = Formula<Rule>::RowSum(gradient, width());
      batch.values.columns[i] = static_cast<float>(std::max(batch.columns[i], 1));
      batch.values.values[i] = state_.slots[kSlots][batch.rows[i]];
    }
  }

  // The values of the next batch have been read, since what was just written one by one is slow to
  // read as a vector.
  HWY_INLINE void UpdateSomeRows(RowBatch& batch, const RowBatch& next) const {
    if constexpr (kRowSlots > 0) Formula<Rule>::BeginRows(rule_, batch.values);
    for (int i = 0; i < batch.count; ++i) {
      if (i < next.count) PrefetchState<Cache::kNear, kWidth>(state_, next.rows[i]);
      if constexpr (kRowSlots > 0) {
        state_.slots[kSlots][batch.rows[i]] = batch.values.values[i];
        UpdateRow(Formula<Rule>::OfRow(rule_, batch.values.factors[i]), batch, i);
      } else {
        UpdateRow(rule_, batch, i);
      }
    }
  }

  // Updates rows while their gradients are summed.
  template <class Sums>
  HWY_INLINE void UpdateAllRows(Sums& sums, UpdatePass& pass) const {
    const Touch* touch = pass.args.touches;
    const Touch* const end = touch + pass.args.touch_count;
    for (; touch != end; ++pass.counts.updated) {
      const uint32_t row = touch->row;
      const int columns = pass.ColumnsOf(row);
      char* weights = state_.Weights(row);
      float* slots[kSlots + 1];
      FindSlots(row, slots);
      touch = sums.SumRow(touch, end, [&](size_t column, const auto& g) HWY_ATTR {
        UpdateBlock<std::extent_v<std::remove_reference_t<decltype(g)>>>(Wide(), rule_, column, g,
                                                                         weights, slots);
      });
      if (columns < static_cast<int>(width())) ClearPadding<kDtype>(pass, row, columns, weights);
    }
  }

 private:
  static constexpr int kSlots = Formula<Rule>::kSlots;
  static constexpr int kRowSlots = Formula<Rule>::kRowSlots;

  HWY_INLINE size_t width() const { return kWidth > 0 ? kWidth : state_.width; }

  HWY_INLINE void FindSlots(uint32_t row, float** slots) const {
    for (int s = 0; s < kSlots; ++s) slots[s] = state_.slots[s] + row * width();
  }

  HWY_INLINE void UpdateRow(const Rule& rule, const RowBatch& batch, int i) const {
    const float* gradient = batch.gradients + i * stride_;
    char* weights = batch.weights[i];
    float* slots[kSlots + 1];
    FindSlots(batch.rows[i], slots);
    size_t column = UpdateBlocks<2>(Wide(), rule, 0, gradient, weights, slots);
    column = UpdateBlocks<1>(Wide(), rule, column, gradient, weights, slots);
    if constexpr (hn::MaxLanes(Wide()) > hn::MaxLanes(Narrow())) {
      UpdateBlocks<1>(Narrow(), rule, column, gradient, weights, slots);
    }
    if (batch.columns[i] < static_cast<int>(width())) {
      ClearPadding<kDtype>(pass_, batch.rows[i], batch.columns[i], weights);
    }
  }

  template <int kVectors, class D>
  HWY_INLINE size_t UpdateBlocks(D d, const Rule& rule, size_t column, const float* gradient,
                                 char* weights, float* const* slots) const {
    constexpr size_t kLanes = hn::MaxLanes(D());
    for (; column + kVectors * kLanes <= width(); column += kVectors * kLanes) {
      hn::Vec<D> g[kVectors];
      for (int v = 0; v < kVectors; ++v) g[v] = hn::Load(d, gradient + column + v * kLanes);
      UpdateBlock<kVectors>(d, rule, column, g, weights, slots);
    }
    return column;
  }

  template <int kVectors, class D>
  HWY_INLINE void UpdateBlock(D d, const Rule& rule, size_t column, const hn::Vec<D>* g,
                              char* weights, float* const* slots) const {
    constexpr size_t kLanes = hn::MaxLanes(D());
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
    StoreBlock<kVectors>(d, w, weights, column);
  }

  template <int kVectors, class D>
  static HWY_INLINE void StoreBlock(D d, const hn::Vec<D>* w, char* weights, size_t column) {
    constexpr size_t kLanes = hn::MaxLanes(D());
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

  const UpdatePass& pass_;
  const RowState state_;
  const size_t stride_ = kWidth > 0 ? kWidth : pass_.stride;
  const CommonRule common_ = pass_.step.common;
  const Rule rule_ = std::get<Rule>(pass_.step.rule);
};

// The gradients of a batch are summed before the batch before it is updated. A user's rule has one
// block of gradients, so it updates each batch at once.
template <class Sum, class Update>
HWY_INLINE void UpdateInBatches(const UpdatePass& pass, const Sum& sum, const Update& update) {
  const size_t floats = pass.rows_at_once * pass.stride;
  const auto gradients = hwy::AllocateAligned<float>(2 * floats);
  std::fill_n(gradients.get(), 2 * floats, 0.0f);
  RowBatch batches[2];
  batches[0].gradients = pass.custom ? pass.custom->inputs[0] : gradients.get();
  batches[1].gradients = gradients.get() + floats;
  const Touch* touch = pass.args.touches;
  int summed = 0, other = pass.custom ? 0 : 1;
  do {
    touch = sum(touch, batches[summed]);
    std::swap(summed, other);
    update(batches[summed], batches[other]);
  } while (batches[other].count > 0);
}

using UpdateSomeRows = void (*)(const UpdatePass&, RowBatch& batch, RowBatch& next);
using UpdateAllRows = void (*)(UpdatePass&);

template <class Rule, v1::DataType kDtype>
void UpdateByRule(const UpdatePass& pass, RowBatch& batch, RowBatch& next) {
  const RowUpdates<Rule, kDtype, 0> updates(pass, pass.state);
  for (int i = 0; i < next.count; ++i) updates.ReadValue(next.gradients + i * pass.stride, i, next);
  updates.UpdateSomeRows(batch, next);
}

// The whole pass as one piece of code, to which the state's layout is known.
template <class Rule, v1::DataType kDtype, int kWidth>
void UpdateFromArray(UpdatePass& pass) {
  constexpr bool kInBatches = Formula<Rule>::kRowSlots > 0;
  RowState state = pass.state;
  state.width = kWidth;
  state.weight_bytes = config::WeightBytes(kDtype);
  state.slot_count = Formula<Rule>::kSlots;
  state.has_value = kInBatches;
  GradientSums<Wide, kWidth, GradientArray, true> sums(pass, state, RowsAhead(state.TouchBytes()),
                                                       {pass.args.gradients, kWidth});
  const RowUpdates<Rule, kDtype, kWidth> updates(pass, state);
  if constexpr (kInBatches) {
    UpdateInBatches(
        pass,
        [&](const Touch* touch, RowBatch& batch) HWY_ATTR {
          return sums.SumSomeRows(touch, batch, [&](const float* gradient, int i) HWY_ATTR {
            updates.ReadValue(gradient, i, batch);
          });
        },
        [&](RowBatch& batch, RowBatch& next) HWY_ATTR { updates.UpdateSomeRows(batch, next); });
  } else {
    updates.UpdateAllRows(sums, pass);
  }
}

// Copies rows into a block of a user's rule. kWidth as in GradientSums.
template <v1::DataType kDtype, int kWidth>
HWY_INLINE void ReadRows(char* const* rows, int count, size_t width, float* block) {
  const std::conditional_t<(kWidth > 0), Wide, Narrow> d;
  if (kWidth > 0) width = kWidth;
  for (int i = 0; i < count; ++i, block += width) {
    const char* const row = rows[i];
#pragma GCC unroll 4
    for (size_t c = 0; c < width; c += hn::MaxLanes(d)) {
      hn::Store(LoadRow<kDtype>(d, row, c), d, block + c);
    }
  }
}

// The reverse. NaN is one NaN: its bits depend on the order of operands, which compilers change.
template <v1::DataType kDtype, int kWidth>
HWY_INLINE void WriteRows(const float* block, int count, size_t width, char* const* rows) {
  const std::conditional_t<(kWidth > 0), Wide, Narrow> d;
  if (kWidth > 0) width = kWidth;
  for (int i = 0; i < count; ++i, block += width) {
    char* const row = rows[i];
#pragma GCC unroll 4
    for (size_t c = 0; c < width; c += hn::MaxLanes(d)) {
      const auto x = hn::Load(d, block + c);
      StoreRow<kDtype>(d, hn::IfThenElse(hn::IsNaN(x), hn::NaN(d), x), row, c);
    }
  }
}

// By a user's rule, into whose block of gradients they were summed.
template <v1::DataType kDtype, int kWidth>
void UpdateByCustom(const UpdatePass& pass, RowBatch& batch, RowBatch&) {
  const CustomRun& run = *pass.custom;
  const size_t width = pass.width;
  const int count = batch.count, slot_count = pass.state.slot_count;
  char* slots[kMaxSlots][kMostRows];
  ReadRows<kDtype, kWidth>(batch.weights, count, width, run.inputs[1]);
  for (int s = 0; s < slot_count; ++s) {
    float* const first = pass.args.slots[s];
    for (int i = 0; i < count; ++i) {
      slots[s][i] = reinterpret_cast<char*>(first + batch.rows[i] * width);
    }
    ReadRows<v1::FLOAT32, kWidth>(slots[s], count, width, run.inputs[2 + s]);
  }
  run.Run(count * width);
  WriteRows<kDtype, kWidth>(run.results[0], count, width, batch.weights);
  for (int s = 0; s < slot_count; ++s) {
    WriteRows<v1::FLOAT32, kWidth>(run.results[1 + s], count, width, slots[s]);
  }
  for (int i = 0; i < count; ++i) {
    if (batch.columns[i] < static_cast<int>(width)) {
      ClearPadding<kDtype>(pass, batch.rows[i], batch.columns[i], batch.weights[i]);
    }
  }
}

// How rows of one storage type are updated.
struct RuleKernel {
  UpdateSomeRows some;
  UpdateAllRows all = nullptr;  // from an array, no row being skipped
};
struct RuleKernels {
  RuleKernel float32, bfloat16;
  int slots, row_slots;
};

// Of an array, the usual rules have a pass of their own for the widths that matter most.
template <class Rule, v1::DataType kDtype>
RuleKernel KernelOf(int width) {
  RuleKernel kernel = {UpdateByRule<Rule, kDtype>};
  if constexpr (std::is_same_v<Rule, SgdRule> || std::is_same_v<Rule, AdagradRule> ||
                std::is_same_v<Rule, RowwiseAdagradRule>) {
    kernel.all = WithWidth(width, []<int kWidth>(Width<kWidth>) -> UpdateAllRows {
      if constexpr (kWidth > 0) return UpdateFromArray<Rule, kDtype, kWidth>;
      return nullptr;
    });
  }
  return kernel;
}

template <v1::DataType kDtype>
UpdateSomeRows CustomKernel(int width) {
  return WithWidth(width, []<int kWidth>(Width<kWidth>) -> UpdateSomeRows {
    return UpdateByCustom<kDtype, kWidth>;
  });
}

RuleKernels KernelsOf(const UpdateRule& rule, int width) {
  return std::visit(
      [width]<class Rule>(const Rule& one) -> RuleKernels {
        if constexpr (std::is_same_v<Rule, CustomRule>) {
          const int slots = static_cast<int>(one.program->results.size()) - 1;
          return {
              {CustomKernel<v1::FLOAT32>(width)}, {CustomKernel<v1::BFLOAT16>(width)}, slots, 0};
        } else {
          return {KernelOf<Rule, v1::FLOAT32>(width), KernelOf<Rule, v1::BFLOAT16>(width),
                  Formula<Rule>::kSlots, Formula<Rule>::kRowSlots};
        }
      },
      rule);
}

// Weights that no rule reads as they are stored: they are made float32 for it, and rounded later.
template <v1::DataType kDtype>
class WidenedRows {
 public:
  explicit WidenedRows(const UpdatePass& pass)
      : pass_(pass),
        weights_(hwy::AllocateAligned<float>(pass.rows_at_once * pass.stride)),
        random_(hwy::AllocateAligned<uint16_t>(pass.stride)) {}

  void Widen(RowBatch& batch) const {
    for (int i = 0; i < batch.count; ++i) {
      for (size_t c = 0; c < pass_.width; c += kLanes) {
        hn::Store(LoadRow<kDtype>(d_, batch.weights[i], c), d_, Row(i) + c);
      }
      batch.weights[i] = reinterpret_cast<char*>(Row(i));
    }
  }

  void Round(const RowBatch& batch) const {
    for (int i = 0; i < batch.count; ++i) {
      char* const weights = pass_.state.Weights(batch.rows[i]);
      if (pass_.args.stochastic_rounding) {
        RandomHalves(SubKey(pass_.args.rounding_key, batch.rows[i]), pass_.args.width,
                     random_.get());
      }
      for (size_t c = 0; c < pass_.width; c += kLanes) {
        const auto w = hn::Load(d_, Row(i) + c);
        if (pass_.args.stochastic_rounding) {
          StoreRowRandomly<kDtype>(d_, w, random_.get() + c, weights, c);
        } else {
          StoreRow<kDtype>(d_, w, weights, c);
        }
      }
    }
  }

 private:
  static constexpr Narrow d_{};
  static constexpr size_t kLanes = hn::MaxLanes(Narrow());

  float* Row(int i) const { return weights_.get() + i * pass_.stride; }

  const UpdatePass& pass_;
  const hwy::AlignedFreeUniquePtr<float[]> weights_;
  const hwy::AlignedFreeUniquePtr<uint16_t[]> random_;  // of the row's columns
};

template <v1::DataType kDtype>
void UpdateWidened(UpdatePass& pass, UpdateSomeRows update) {
  const WidenedRows<kDtype> rows(pass);
  const SumSomeRows sum = SumsOf(pass.args);
  UpdateInBatches(
      pass, [&](const Touch* touch, RowBatch& batch) { return sum(pass, touch, batch); },
      [&](RowBatch& batch, RowBatch& next) {
        rows.Widen(batch);
        update(pass, batch, next);
        rows.Round(batch);
      });
}

void UpdateAsStored(UpdatePass& pass, UpdateSomeRows update) {
  const SumSomeRows sum = SumsOf(pass.args);
  UpdateInBatches(
      pass, [&](const Touch* touch, RowBatch& batch) { return sum(pass, touch, batch); },
      [&](RowBatch& batch, RowBatch& next) { update(pass, batch, next); });
}

// Says what a row has beside its gradient, and how many rows a batch has: what the caches hold, or
// the columns that an operation of a user's rule works on.
void AddState(const RuleKernels& kernels, UpdatePass& pass) {
  const UpdateArgs& args = pass.args;
  const size_t weight_bytes = config::WeightBytes(args.dtype);
  pass.state = {args.weights, {}, pass.width, weight_bytes, kernels.slots, kernels.row_slots > 0};
  std::copy(std::begin(args.slots), std::end(args.slots), pass.state.slots);
  pass.ahead = RowsAhead(pass.state.TouchBytes());
  pass.rows_at_once =
      static_cast<int>(std::clamp<size_t>(kBatchBytes / pass.state.TouchBytes(), 1, kRowsAtOnce));
  if (std::holds_alternative<CustomRule>(pass.step.rule)) {
    pass.stride = pass.width;
    pass.rows_at_once = std::clamp(static_cast<int>(kRuleBlock / pass.width), 1, kMostRows);
  }
}

}  // namespace

UpdateCounts UpdateRowsTarget(const UpdateArgs& args, const StepRule& step) {
  UpdatePass pass{args, step};
  const RuleKernels kernels = KernelsOf(step.rule, args.width);
  AddState(kernels, pass);
  hwy::AlignedFreeUniquePtr<float[]> zeros;
  if (args.gradients == nullptr && args.gradient_rows == nullptr) {
    zeros = hwy::AllocateAligned<float>(pass.width);
    std::fill_n(zeros.get(), pass.width, 0.0f);
    pass.zeros = zeros.get();
  }
  const RuleKernel& kernel = args.dtype == v1::BFLOAT16 ? kernels.bfloat16 : kernels.float32;
  std::optional<CustomRun> custom;
  if (const auto* rule = std::get_if<CustomRule>(&step.rule)) {
    pass.custom = &custom.emplace(*rule->program, step.common, pass.rows_at_once * pass.width);
  }
  if (args.dtype == v1::FLOAT16) {
    UpdateWidened<v1::FLOAT16>(pass, kernels.float32.some);
  } else if (args.dtype == v1::BFLOAT16 && args.stochastic_rounding) {
    UpdateWidened<v1::BFLOAT16>(pass, kernels.float32.some);
  } else if (kernel.all != nullptr && args.gradients != nullptr && !args.skip_nonfinite) {
    kernel.all(pass);
  } else {
    UpdateAsStored(pass, kernel.some);
  }
  return pass.counts;
}

}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace emberd::shard {
HWY_EXPORT(UpdateRowsTarget);
UpdateCounts UpdateRows(const UpdateArgs& args, const StepRule& rule) {
  return HWY_DYNAMIC_DISPATCH(UpdateRowsTarget)(args, rule);
}
}  // namespace emberd::shard
#endif
