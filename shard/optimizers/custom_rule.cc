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
void RunOperation(D d, RuleOp op, T* to, const T* pa, const T* pb, const T* pc, size_t count) {
  using V = hn::Vec<D>;
  const V zero = hn::Zero(d), one = hn::Set(d, T{1});
  const auto run = [&](auto use) HWY_ATTR {
    for (size_t i = 0; i < count; i += hn::MaxLanes(d)) {
      hn::StoreU(use(hn::LoadU(d, pa + i), hn::LoadU(d, pb + i)), d, to + i);
    }
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

template <class D>
void RunProgram(D d, const RuleProgram& program, const CommonRule& common, float* const* places,
                size_t count) {
  float* const w = places[1];
  const float* const* bounds = places + program.nodes.size();
  if (common.decay) RunOperation<D, float>(d, RuleOp::kMultiply, w, w, bounds[0], w, count);
  for (size_t n = 0; n < program.nodes.size(); ++n) {
    const RuleProgram::Node& node = program.nodes[n];
    if (RuleOperands(node.op) == 0) continue;
    RunOperation<D, float>(d, node.op, places[n], places[node.a], places[node.b], places[node.c],
                           count);
  }
  for (size_t r = 0; r < program.results.size(); ++r) {
    const float* const from = places[program.results[r]];
    for (size_t i = 0; i < count; i += hn::MaxLanes(d)) {
      // NaN is one NaN: its bits depend on the order of operands, which compilers change.
      const auto x = hn::LoadU(d, from + i);
      hn::StoreU(hn::IfThenElse(hn::IsNaN(x), hn::NaN(d), x), d, places[1 + r] + i);
    }
  }
  if (!common.clip_weight) return;
  RunOperation<D, float>(d, RuleOp::kMax, w, w, bounds[1], w, count);
  RunOperation<D, float>(d, RuleOp::kMin, w, w, bounds[2], w, count);
}

}  // namespace

double FoldOperation(RuleOp op, double a, double b, double c) {
  double value;
  RunOperation(hn::CappedTag<double, 1>(), op, &value, &a, &b, &c, 1);
  return value;
}

void RunRule(const RuleProgram& program, const CommonRule& common, float* const* places,
             size_t count) {
  if (count % 16 == 0) {
    RunProgram(hn::CappedTag<float, 16>(), program, common, places, count);
  } else {
    RunProgram(hn::CappedTag<float, 8>(), program, common, places, count);
  }
}

}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace emberd::shard {
namespace {

HWY_EXPORT(FoldOperation);
HWY_EXPORT(RunRule);

// Columns at once: the memory of most rules stays in the first level of cache.
constexpr size_t kColumnsAtOnce = 128;
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
  memory_ = hwy::AllocateAligned<float>(places_.size() * kColumnsAtOnce);
  const float bounds[] = {common.keep, common.weight_min, common.weight_max};
  for (size_t n = 0; n < places_.size(); ++n) {
    places_[n] = memory_.get() + n * kColumnsAtOnce;
    const bool bound = n >= program.nodes.size();
    const float number =
        bound ? bounds[n - program.nodes.size()] : static_cast<float>(program.nodes[n].number);
    if (bound || program.nodes[n].op == RuleOp::kNumber) {
      std::fill_n(places_[n], kColumnsAtOnce, number);
    }
  }
}

void CustomRun::Update(const float* g, float* w, float* const* slots, size_t count) {
  for (size_t begin = 0; begin < count; begin += kColumnsAtOnce) {
    places_[0] = const_cast<float*>(g) + begin;
    places_[1] = w + begin;
    for (size_t s = 0; s + 1 < program_.results.size(); ++s) places_[2 + s] = slots[s] + begin;
    HWY_DYNAMIC_DISPATCH(RunRule)
    (program_, common_, places_.data(), std::min(kColumnsAtOnce, count - begin));
  }
}

}  // namespace emberd::shard
#endif
