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
  // Of a. The sign is -1 or 1, or a itself if it is 0 or NaN.
  kCopy,
  kNegate,
  kAbs,
  kSign,
  kSqrt,
  kRsqrt,
  kExp,
  kLog,
  kTanh,
  kFloor,
  // Of a and b. The lesser or greater of a number and NaN is NaN. Comparisons give 1 or 0.
  kMin,
  kMax,
  kPower,
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kEqual,
  kNotEqual,
  kSelect,  // b where a is not 0, else c
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
