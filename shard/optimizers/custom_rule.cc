#include "shard/optimizers/custom_rule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

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
#endif

HWY_BEFORE_NAMESPACE();
namespace emberd::shard::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Of kCount columns.
template <size_t kCount, class D, class T>
HWY_INLINE void RunOperation(D d, RuleOp op, T* to, const T* pa, const T* pb, const T* pc) {
  using V = hn::Vec<D>;
  constexpr size_t kLanes = hn::MaxLanes(d);
  const V zero = hn::Zero(d), one = hn::Set(d, T{1});
  const auto run = [&](auto use) HWY_ATTR {
#pragma GCC unroll 4
    for (size_t i = 0; i < kCount; i += kLanes) {
      hn::Store(use(hn::Load(d, pa + i), hn::Load(d, pb + i), hn::Load(d, pc + i)), d, to + i);
    }
  };
  const auto truth = [&](auto mask) HWY_ATTR { return hn::IfThenElseZero(mask, one); };
  // `a` where it is NaN or `first`, else `b`.
  const auto choose = [&](auto first, V a, V b)
                          HWY_ATTR { return hn::IfThenElse(hn::Or(first, hn::IsNaN(a)), a, b); };
  const auto call = [&](V a, V b) HWY_ATTR {
    HWY_ALIGN T x[kLanes], y[kLanes];
    hn::Store(a, d, x);
    hn::Store(b, d, y);
    for (size_t i = 0; i < kLanes; ++i) x[i] = static_cast<T>(RuleFunction(op, x[i], y[i]));
    return hn::Load(d, x);
  };
  switch (op) {
#define EMBERD_RULE_OP(name, text, hlo, value) \
  case RuleOp::name:                           \
    return run([&](V a, [[maybe_unused]] V b, [[maybe_unused]] V c) HWY_ATTR { return value; });
    EMBERD_RULE_OPS(EMBERD_RULE_OP)
#undef EMBERD_RULE_OP
    default:  // an input
      return;
  }
}

}  // namespace

double FoldOperation(RuleOp op, double a, double b, double c) {
  double value;
  RunOperation<1>(hn::CappedTag<double, 1>(), op, &value, &a, &b, &c);
  return value;
}

void RunOperations(const CustomRun& run, size_t columns) {
  for (size_t at = 0; at < columns; at += kRuleBlock) {
    for (const auto& [op, to, a, b, c] : run.operations) {
      RunOperation<kRuleBlock>(hn::CappedTag<float, 16>(), op, to + at, a + at, b + at, c + at);
    }
  }
}

}  // namespace emberd::shard::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace emberd::shard {
namespace {

HWY_EXPORT(FoldOperation);
HWY_EXPORT(RunOperations);

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

CustomRun::CustomRun(const RuleProgram& program, const CommonRule& common, size_t columns) {
  columns = (columns + kRuleBlock - 1) / kRuleBlock * kRuleBlock;
  memory_ = hwy::AllocateAligned<float>((program.nodes.size() + 4) * columns);
  float* next = memory_.get();
  const auto place = [&](double number) {
    std::fill_n(next, columns, static_cast<float>(number));
    return std::exchange(next, next + columns);
  };
  std::vector<float*> places;
  for (const RuleProgram::Node& node : program.nodes) places.push_back(place(node.number));
  inputs.assign(places.begin(), places.begin() + 1 + program.results.size());
  if (common.decay) {
    operations.push_back({RuleOp::kMultiply, inputs[1], inputs[1], place(common.keep), inputs[1]});
  }
  for (size_t n = 0; n < places.size(); ++n) {
    const auto& [op, a, b, c, number] = program.nodes[n];
    if (RuleOperands(op) > 0) {
      operations.push_back({op, places[n], places[a], places[b], places[c]});
    }
  }
  for (const int result : program.results) results.push_back(places[result]);
  if (!common.clip_weight) return;
  float* const clipped = place(0);
  operations.push_back({RuleOp::kMax, clipped, results[0], place(common.weight_min), clipped});
  operations.push_back({RuleOp::kMin, clipped, clipped, place(common.weight_max), clipped});
  results[0] = clipped;
}

void CustomRun::Run(size_t columns) const { HWY_DYNAMIC_DISPATCH(RunOperations)(*this, columns); }

}  // namespace emberd::shard
#endif
