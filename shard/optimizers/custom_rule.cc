#include "shard/optimizers/custom_rule.h"

#include <algorithm>
#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "shard/optimizers/custom_rule.cc"
#include "hwy/foreach_target.h"
// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "shard/store/portable_numbers.h"

#ifndef EMBERD_SHARD_OPTIMIZERS_CUSTOM_RULE_
#define EMBERD_SHARD_OPTIMIZERS_CUSTOM_RULE_
namespace emberd::shard {
using config::RuleOp;
using config::RuleProgram;

// Columns of all rows together: what most rules work on stays in the first level of cache.
constexpr size_t kColumnsAtOnce = 512;
// From one place to the next. An operand is mostly made before a result, and lies after it: loads
// that look, from their last 12 bits, as if they read what was just stored would wait.
constexpr size_t kPlaceStep = kColumnsAtOnce + 16;

// Operations that have no instruction on some machine.
double RuleFunction(RuleOp op, double a, double b);
}  // namespace emberd::shard

// An operation on vectors a and b.
#define EMBERD_RULE_OP(name, value) \
  case RuleOp::name:                \
    return run([&](V a, [[maybe_unused]] V b) HWY_ATTR { return value; })
#endif

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

template <class D, class T>
HWY_NOINLINE void RunOperation(D d, RuleOp op, T* to, const T* pa, const T* pb, const T* pc,
                               size_t count) {
  using V = hn::Vec<D>;
  const V zero = hn::Zero(d), one = hn::Set(d, T{1});
  const auto run = [&](auto use) HWY_ATTR {
    constexpr size_t kLanes = hn::MaxLanes(d);
    size_t i = 0;
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
      const V first = use(hn::LoadU(d, pa + i), hn::LoadU(d, pb + i));
      const V second = use(hn::LoadU(d, pa + i + kLanes), hn::LoadU(d, pb + i + kLanes));
      hn::StoreU(first, d, to + i);
      hn::StoreU(second, d, to + i + kLanes);
    }
    if (i < count) hn::StoreU(use(hn::LoadU(d, pa + i), hn::LoadU(d, pb + i)), d, to + i);
  };
  const auto truth = [&](auto mask) HWY_ATTR { return hn::IfThenElseZero(mask, one); };
  // `a` where it is NaN or `first`, else `b`.
  const auto choose = [&](auto first, V a, V b)
                          HWY_ATTR { return hn::IfThenElse(hn::Or(first, hn::IsNaN(a)), a, b); };
  switch (op) {
    EMBERD_RULE_OP(kCopy, a);
    EMBERD_RULE_OP(kNegate, hn::Neg(a));
    EMBERD_RULE_OP(kAbs, hn::Abs(a));
    EMBERD_RULE_OP(kSign, choose(hn::Eq(a, zero), a, hn::CopySign(one, a)));
    EMBERD_RULE_OP(kSqrt, hn::Sqrt(a));
    EMBERD_RULE_OP(kRsqrt, hn::Div(one, hn::Sqrt(a)));
    EMBERD_RULE_OP(kMin, choose(hn::Lt(a, b), a, b));
    EMBERD_RULE_OP(kMax, choose(hn::Lt(b, a), a, b));
    EMBERD_RULE_OP(kAdd, hn::Add(a, b));
    EMBERD_RULE_OP(kSubtract, hn::Sub(a, b));
    EMBERD_RULE_OP(kMultiply, hn::Mul(a, b));
    EMBERD_RULE_OP(kDivide, hn::Div(a, b));
    EMBERD_RULE_OP(kLess, truth(hn::Lt(a, b)));
    EMBERD_RULE_OP(kLessEqual, truth(hn::Le(a, b)));
    EMBERD_RULE_OP(kGreater, truth(hn::Lt(b, a)));
    EMBERD_RULE_OP(kGreaterEqual, truth(hn::Le(b, a)));
    EMBERD_RULE_OP(kEqual, truth(hn::Eq(a, b)));
    EMBERD_RULE_OP(kNotEqual, truth(hn::Not(hn::Eq(a, b))));
    case RuleOp::kSelect:
      for (size_t i = 0; i < count; ++i) to[i] = pa[i] != 0 ? pb[i] : pc[i];
      return;
    default:
      for (size_t i = 0; i < count; ++i) to[i] = static_cast<T>(RuleFunction(op, pa[i], pb[i]));
  }
}

HWY_NOINLINE void RunProgram(const RuleProgram& program, const CommonRule& common,
                             float* const* places, size_t count) {
  const hn::CappedTag<float, 16> d;
  float* const w = places[1];
  const float* const* bounds = places + program.nodes.size();
  const auto run = [&](RuleOp op, float* to, const float* a, const float* b, const float* c)
                       HWY_ATTR { RunOperation(d, op, to, a, b, c, count); };
  if (common.decay) run(RuleOp::kMultiply, w, w, bounds[0], w);
  for (size_t n = 0; n < program.nodes.size(); ++n) {
    const RuleProgram::Node& node = program.nodes[n];
    if (RuleOperands(node.op) == 0) continue;
    run(node.op, places[n], places[node.a], places[node.b], places[node.c]);
  }
  if (!common.clip_weight) return;
  run(RuleOp::kMax, w, places[program.results[0]], bounds[1], w);
  run(RuleOp::kMin, w, w, bounds[2], w);
}

// NaN is one NaN: its bits depend on the order of operands, which compilers change.
template <class D>
HWY_INLINE void Move(D d, const float* from, float* to, size_t count) {
  for (size_t i = 0; i < count; i += hn::MaxLanes(d)) {
    const auto x = hn::LoadU(d, from + i);
    hn::StoreU(hn::IfThenElse(hn::IsNaN(x), hn::NaN(d), x), d, to + i);
  }
}

// Rows that are narrow are updated together, those that are wide piece by piece. `d` divides width.
template <class D>
void UpdateRowsWith(D d, const RuleProgram& program, const CommonRule& common, float** places,
                    const CustomRows& rows) {
  const size_t piece = std::min(rows.stride, kColumnsAtOnce), together = kColumnsAtOnce / piece;
  for (size_t first = 0; first < rows.count; first += together) {
    const size_t count = std::min(together, rows.count - first);
    for (size_t c = 0; c < rows.width; c += piece) {
      const size_t columns = std::min(piece, rows.width - c);
      const auto each = [&](const auto& use) HWY_ATTR {
        for (size_t i = 0; i < count; ++i) {
          use(0, i * piece, reinterpret_cast<float*>(rows.weights[first + i]) + c);
          for (size_t s = 1; s < program.results.size(); ++s) {
            use(s, i * piece, rows.slots[s - 1] + rows.rows[first + i] * rows.width + c);
          }
        }
      };
      each([&](size_t value, size_t at, const float* stored)
               HWY_ATTR { Move(d, stored, places[1 + value] + at, columns); });
      places[0] = rows.gradients + first * rows.stride + c;
      RunProgram(program, common, places, (count - 1) * piece + (columns + 15) / 16 * 16);
      each([&](size_t value, size_t at, float* stored) HWY_ATTR {
        const bool clipped = value == 0 && common.clip_weight;
        Move(d, places[clipped ? 1 : program.results[value]] + at, stored, columns);
      });
    }
  }
}

}  // namespace

double FoldOperation(RuleOp op, double a, double b, double c) {
  double value;
  RunOperation(hn::CappedTag<double, 1>(), op, &value, &a, &b, &c, 1);
  return value;
}

void UpdateCustomRows(const RuleProgram& program, const CommonRule& common, float** places,
                      const CustomRows& rows) {
  if (rows.width == rows.stride) {
    UpdateRowsWith(hn::CappedTag<float, 16>(), program, common, places, rows);
  } else {
    UpdateRowsWith(hn::CappedTag<float, 8>(), program, common, places, rows);
  }
}

}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace emberd::shard {
namespace {

HWY_EXPORT(FoldOperation);
HWY_EXPORT(UpdateCustomRows);

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinite = std::numeric_limits<double>::infinity();

}  // namespace

double RuleFunction(RuleOp op, double a, double b) {
  const double e = op == RuleOp::kTanh ? PortableExp(-2 * std::abs(a)) : 0;
  switch (op) {
    case RuleOp::kExp:
      return PortableExp(a);
    case RuleOp::kLog:
      return a > 0 && a < kInfinite ? PortableLog(a) : a == 0 ? -kInfinite : a > 0 ? a : kNaN;
    case RuleOp::kTanh:  // near 0, a difference would cancel
      return std::abs(a) < 1e-3 ? a - a * a * a / 3 : std::copysign((1 - e) / (1 + e), a);
    case RuleOp::kFloor:
      return std::floor(a);
    default:
      if (!(a < 0) || std::isinf(a) || !std::isfinite(b)) return PortablePow(a, b);
      if (b != std::floor(b)) return kNaN;
      return std::fmod(b, 2) == 0 ? PortablePow(-a, b) : -PortablePow(-a, b);
  }
}

std::shared_ptr<const RuleProgram> MakeCustomProgram(const v1::OptimizerConfig& optimizer,
                                                     int64_t step) {
  const auto program = std::make_shared<RuleProgram>(*config::CompileRule(optimizer.custom()));
  for (RuleProgram::Node& node : program->nodes) {
    const RuleProgram::Node* operands[] = {&program->nodes[node.a], &program->nodes[node.b],
                                           &program->nodes[node.c]};
    if (node.op <= RuleOp::kSlot) continue;
    if (node.op == RuleOp::kLearningRate) {
      node.number = optimizer.learning_rate();
    } else if (node.op == RuleOp::kStep) {
      node.number = static_cast<double>(step);
    } else if (node.op == RuleOp::kHyperParameter) {
      node.number = optimizer.custom().hyper_parameters(node.a).value();
    } else if (std::all_of(operands, operands + RuleOperands(node.op),
                           [](const auto* one) { return one->op == RuleOp::kNumber; }) &&
               node.op != RuleOp::kNumber) {
      node.number = HWY_DYNAMIC_DISPATCH(FoldOperation)(node.op, operands[0]->number,
                                                        operands[1]->number, operands[2]->number);
    } else if (node.op != RuleOp::kNumber) {
      continue;
    }
    if (program->all_float32) node.number = static_cast<float>(node.number);
    node.op = RuleOp::kNumber;
  }
  return program;
}

CustomRun::CustomRun(const RuleProgram& program, const CommonRule& common)
    : program_(program), common_(common), places_(program.nodes.size() + 3) {
  memory_ = hwy::AllocateAligned<float>(places_.size() * kPlaceStep);
  std::fill_n(memory_.get(), places_.size() * kPlaceStep, 0.0f);
  const float bounds[] = {common.keep, common.weight_min, common.weight_max};
  for (size_t n = 0; n < places_.size(); ++n) {
    places_[n] = memory_.get() + (places_.size() - 1 - n) * kPlaceStep;
    const bool bound = n >= program.nodes.size();
    const float number =
        bound ? bounds[n - program.nodes.size()] : static_cast<float>(program.nodes[n].number);
    if (bound || program.nodes[n].op == RuleOp::kNumber) {
      std::fill_n(places_[n], kColumnsAtOnce, number);
    }
  }
}

void CustomRun::Update(const CustomRows& rows) {
  HWY_DYNAMIC_DISPATCH(UpdateCustomRows)(program_, common_, places_.data(), rows);
}

}  // namespace emberd::shard
#endif
