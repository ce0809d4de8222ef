// A user's update rule (CustomConfig), compiled from either of its forms: numbers, and operations
// on numbers before them, element by element.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "emberd/v1/model.pb.h"

namespace emberd::config {

inline constexpr int kMaxCustomSlots = 4;

// Each operation: its name, what expressions and StableHLO call it, and what it makes of vectors
// a, b and c, as custom_rule.cc of shard/ runs it. Truths are 1 or 0. The sign is -1 or 1, or a
// itself if it is 0 or NaN. The lesser or greater of a number and NaN is NaN. kSelect: b where a is
// not 0, else c. RuleOperands and NamedOp::Level rely on the order: of a alone, then of a and b.
#define EMBERD_RULE_OPS(OP)                                                   \
  OP(kCopy, "", "convert", a)                                                 \
  OP(kNegate, "", "negate", hn::Neg(a))                                       \
  OP(kAbs, "abs", "abs", hn::Abs(a))                                          \
  OP(kSign, "sign", "sign", choose(hn::Eq(a, zero), a, hn::CopySign(one, a))) \
  OP(kSqrt, "sqrt", "sqrt", hn::Sqrt(a))                                      \
  OP(kRsqrt, "rsqrt", "rsqrt", hn::Div(one, hn::Sqrt(a)))                     \
  OP(kExp, "exp", "exponential", call(a, b))                                  \
  OP(kLog, "log", "log", call(a, b))                                          \
  OP(kTanh, "tanh", "tanh", call(a, b))                                       \
  OP(kFloor, "floor", "floor", call(a, b))                                    \
  OP(kMin, "min", "minimum", choose(hn::Lt(a, b), a, b))                      \
  OP(kMax, "max", "maximum", choose(hn::Lt(b, a), a, b))                      \
  OP(kPower, "pow", "power", call(a, b))                                      \
  OP(kAdd, "+", "add", hn::Add(a, b))                                         \
  OP(kSubtract, "-", "subtract", hn::Sub(a, b))                               \
  OP(kMultiply, "*", "multiply", hn::Mul(a, b))                               \
  OP(kDivide, "/", "divide", hn::Div(a, b))                                   \
  OP(kLess, "<", "LT", truth(hn::Lt(a, b)))                                   \
  OP(kLessEqual, "<=", "LE", truth(hn::Le(a, b)))                             \
  OP(kGreater, ">", "GT", truth(hn::Lt(b, a)))                                \
  OP(kGreaterEqual, ">=", "GE", truth(hn::Le(b, a)))                          \
  OP(kEqual, "==", "EQ", truth(hn::Eq(a, b)))                                 \
  OP(kNotEqual, "!=", "NE", truth(hn::Not(hn::Eq(a, b))))                     \
  OP(kSelect, "where", "select", hn::IfThenElse(hn::Eq(a, zero), c, b))

enum class RuleOp : uint8_t {
  // Inputs: of slots and hyper-parameters, number a. Those from kLearningRate on are the same for
  // all elements.
  kGradient,
  kWeight,
  kSlot,
  kLearningRate,
  kStep,
  kHyperParameter,
  kNumber,
#define EMBERD_RULE_OP(name, text, hlo, value) name,
  EMBERD_RULE_OPS(EMBERD_RULE_OP)
#undef EMBERD_RULE_OP
};

// How many of a, b and c are nodes.
constexpr int RuleOperands(RuleOp op) {
  return op < RuleOp::kCopy ? 0 : op < RuleOp::kMin ? 1 : op < RuleOp::kSelect ? 2 : 3;
}

struct RuleProgram {
  struct Node {
    RuleOp op;
    int a = 0, b = 0, c = 0;
    double number = 0;
  };
  // Gradient, weight, slots; then others, each after those that it takes.
  std::vector<Node> nodes;
  std::vector<int> results;  // nodes with operands: the updated weight, then the slots
  // Whether what is the same for all elements is float32, too, as StableHLO says; else it is
  // double, and rounded where it meets an element.
  bool all_float32 = false;
};

// INVALID_ARGUMENT names the form with the line and column of the fault, and what would be right.
absl::StatusOr<RuleProgram> CompileRule(const v1::CustomConfig& custom);

// All that the comments of CustomConfig ask for; `path` is that of `custom`.
absl::Status CheckCustom(const v1::CustomConfig& custom, const std::string& path);

// Whether a rule without faults uses the number of the step.
bool RuleUsesStep(const v1::CustomConfig& custom);

}  // namespace emberd::config
