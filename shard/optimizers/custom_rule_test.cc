#include "shard/optimizers/custom_rule.h"

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "base/testing/sanitized.h"
#include "config/optimizers.h"
#include "shard/store/stack_store.h"
#include "shard/testing/optimizer_cases.h"
#include "shard/testing/scalar_optimizers.h"
#include "shard/testing/test_engine.h"
#include "shard/update/update_kernel.h"

namespace emberd::shard {
namespace custom_rule_test {

using testing::RowValues;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The row after one step.
RowValues After(const std::string& optimizer, RowValues row, const std::vector<float>& g,
                int64_t step = 0) {
  testing::KernelUpdate(MakeStepRule(testing::CompleteOptimizer(optimizer), step), g, row);
  return row;
}

// The same number, or both NaN.
bool Same(float a, float b) { return (std::isnan(a) && std::isnan(b)) || a == b; }

// A random expression, as text and as its value, worked out at
// once: in double as long as only numbers that are the same for all elements meet, else rounded to
// float32 after each operation.
struct Term {
  std::string text;
  double value;
  bool uniform;
};

class RandomTerms {
 public:
  RandomTerms(std::mt19937_64& random, const std::map<std::string, Term>& names)
      : random_(random), names_(names) {}

  Term Make(int depth) {
    if (depth == 0 || random_() % 8 == 0) return Leaf();
    const Term a = Make(depth - 1);
    const double x = a.value;
    switch (random_() % 8) {
      case 0:
        return Done(absl::StrCat("-", a.text), -x, a.uniform);
      case 1:
        return Done(absl::StrCat("abs(", a.text, ")"), std::abs(x), a.uniform);
      case 2:
        return Done(absl::StrCat("sqrt(abs(", a.text, "))"), std::sqrt(std::abs(x)), a.uniform);
      case 3:
        return Done(absl::StrCat("floor(", a.text, ")"), std::floor(x), a.uniform);
      case 4:
        return Done(absl::StrCat("sign(", a.text, ")"), x > 0 ? 1 : x < 0 ? -1 : x, a.uniform);
      default:
        return Join(a, Make(depth - 1), depth);
    }
  }

 private:
  Term Leaf() {
    if (random_() % 5 == 0) {
      const double number = static_cast<double>(random_() % 4000) / 1000;
      return {absl::StrCat(number), number, true};
    }
    auto name = names_.begin();
    std::advance(name, random_() % names_.size());
    return name->second;
  }

  Term Join(const Term& a, const Term& b, int depth) {
    // One that is uniform is rounded where it meets an element.
    const bool uniform = a.uniform && b.uniform;
    const double x = uniform ? a.value : static_cast<float>(a.value);
    const double y = uniform ? b.value : static_cast<float>(b.value);
    const auto infix = [&](const char* op, double value) {
      return Done(absl::StrCat("(", a.text, " ", op, " ", b.text, ")"), value, uniform);
    };
    switch (random_() % 10) {
      case 0:
      case 1:
        return infix("+", x + y);
      case 2:
      case 3:
        return infix("-", x - y);
      case 4:
      case 5:
        return infix("*", x * y);
      case 6:
        return infix("/", x / y);
      case 7:
        return Done(absl::StrCat("min(", a.text, ",", b.text, ")"), std::isnan(x) || x < y ? x : y,
                    uniform);
      case 8: {
        const Term c = Make(depth - 1);
        return Done(absl::StrCat("where(", a.text, " <= ", b.text, ", ", c.text, ", w)"),
                    x <= y ? c.value : names_.at("w").value, false);
      }
      default:
        return random_() % 2 == 0 ? infix(">", x > y) : infix("!=", x != y);
    }
  }

  static Term Done(std::string text, double value, bool uniform) {
    return {std::move(text), uniform ? value : static_cast<float>(value), uniform};
  }

  std::mt19937_64& random_;
  const std::map<std::string, Term>& names_;
};

// One operation in float32 is that in double, rounded: + - * / and sqrt.
TEST(CustomRule, RandomProgramsAreWhatASlowInterpreterSays) {
  std::mt19937_64 random(TestSeed());
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < Rounds(2000); ++trial) {
    // Every column has the same numbers: what a program makes of them is one number.
    const float g = normal(random), w = normal(random), a = normal(random), b = normal(random);
    const std::map<std::string, Term> names = {
        {"g", {"g", g, false}},     {"w", {"w", w, false}},   {"a", {"a", a, false}},
        {"b", {"b", b, false}},     {"k", {"k", 0.75, true}}, {"lr", {"lr", 0.25, true}},
        {"step", {"step", 6, true}}};
    RandomTerms terms(random, names);
    Term made[3];
    for (Term& one : made) one = terms.Make(5);
    const std::string optimizer =
        absl::StrCat(testing::Custom(absl::StrCat("x = ", made[0].text, "; y = ", made[1].text,
                                                  "; b = ", made[2].text, "; w = x; a = y"),
                                     "slots { name: 'a' } slots { name: 'b' } "
                                     "hyper_parameters { name: 'k' value: 0.75 }"),
                     " learning_rate: 0.25");
    // Some of a vector, whole vectors, and more columns than are updated at once.
    const size_t width = trial % 3 == 0 ? 24 : trial % 3 == 1 ? 160 : 1032;
    const RowValues row = After(optimizer,
                                {std::vector<float>(width, w),
                                 {std::vector<float>(width, a), std::vector<float>(width, b)}},
                                std::vector<float>(width, g), 6);
    for (size_t c = 0; c < width; ++c) {
      ASSERT_TRUE(Same(row.w[c], static_cast<float>(made[0].value))) << made[0].text;
      ASSERT_TRUE(Same(row.slots[0][c], static_cast<float>(made[1].value))) << made[1].text;
      ASSERT_TRUE(Same(row.slots[1][c], static_cast<float>(made[2].value))) << made[2].text;
    }
  }
}

// What the rule makes of rows of which some are touched once, some twice, and half have padding:
// the bytes of weights, then those of the slot.
std::vector<char> AfterManyRows(const std::string& optimizer, int width, v1::DataType dtype,
                                bool stochastic, uint64_t seed) {
  constexpr int kRows = 41, kSamples = 16;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> gradients(kSamples * width), slot(kRows * width);
  for (float& value : gradients) value = normal(random);
  for (float& value : slot) value = normal(random);
  std::vector<char> weights(slot.size() * config::WeightBytes(dtype));
  WriteStoredRow(dtype, slot, weights.data());
  std::vector<Touch> touches;
  for (uint32_t row = 0; row < kRows; row += 1 + row % 2) {
    for (uint32_t i = 0; i <= row % 3 / 2; ++i) {
      touches.push_back({row, static_cast<uint32_t>(random() % kSamples), 0.5f});
    }
  }
  UpdateArgs args;
  args.touch_count = static_cast<int64_t>(touches.size());
  touches.resize(touches.size() + kTouchPadding);
  args.touches = touches.data();
  args.gradients = gradients.data();
  args.width = width;
  const RowRange ranges[] = {{0, kRows / 2, width, 0}, {kRows / 2, kRows, width - 3, 1}};
  args.ranges = ranges;
  args.weights = weights.data();
  args.dtype = dtype;
  args.stochastic_rounding = stochastic;
  args.slots[0] = slot.data();
  UpdateRows(args, MakeStepRule(testing::CompleteOptimizer(optimizer + " learning_rate: 0.1"), 0));
  const char* const bytes = reinterpret_cast<const char*>(slot.data());
  weights.insert(weights.end(), bytes, bytes + slot.size() * sizeof(float));
  return weights;
}

// Prevents: rows of a block that mix, in a width that has code of its own or is wider than a block;
// 16-bit weights that are rounded in another way; padding that fills up.
TEST(CustomRule, UpdatesManyRowsAsTheBuiltInOptimizerDoes) {
  const std::string custom =
      testing::Custom("m = 0.5 * m + g; w = w - lr * m", "slots { name: 'm' }");
  const uint64_t seed = TestSeed();
  for (const int width : {8, 16, 24, 32, 64, 128, 136, 264}) {
    for (const v1::DataType dtype : {v1::FLOAT32, v1::BFLOAT16, v1::FLOAT16}) {
      for (const bool stochastic : {false, dtype != v1::FLOAT32}) {
        EXPECT_TRUE(AfterManyRows(custom, width, dtype, stochastic, seed) ==
                    AfterManyRows("momentum { momentum: 0.5 }", width, dtype, stochastic, seed))
            << width << " " << v1::DataType_Name(dtype) << " " << stochastic;
      }
    }
  }
}

// Both as an operation on elements and on numbers that are the same for all of them.
TEST(CustomRule, FunctionsAreTheLibrarysToTheLastBitOfAFloat) {
  const struct {
    const char* name;
    double (*function)(double);
  } kFunctions[] = {{"exp(", std::exp},
                    {"log(", std::log},
                    {"tanh(", std::tanh},
                    {"rsqrt(", [](double x) { return 1 / std::sqrt(x); }},
                    {"floor(", std::floor}};
  const std::vector<float> g = {0.0f,  1e-30f, 1e-5f,     0.0009f,   0.0011f, 0.5f,
                                1.0f,  20.0f,  88.0f,     100.0f,    -1e-5f,  -0.5f,
                                -3.0f, -90.0f, kInfinity, -kInfinity};
  for (const auto& [name, function] : kFunctions) {
    const RowValues row =
        After(testing::Custom(absl::StrCat("w = ", name, "g)")), {std::vector<float>(16), {}}, g);
    for (size_t c = 0; c < g.size(); ++c) {
      const float expected = static_cast<float>(function(g[c]));
      const float next = std::nextafter(expected, row.w[c]);
      EXPECT_TRUE(Same(row.w[c], expected) || row.w[c] == next)
          << name << g[c] << ") " << row.w[c] << " expected " << expected;
      if (!std::isfinite(g[c])) continue;
      const RowValues same =
          After(testing::Custom(absl::StrCat("w = ", name, "k)"),
                                absl::StrCat("hyper_parameters { name: 'k' value: ", g[c], " }")),
                {std::vector<float>(16), {}}, g);
      EXPECT_TRUE(Same(same.w[0], expected) ||
                  std::abs(same.w[0] - expected) <= std::abs(expected) * 0x1p-23f)
          << name << g[c] << ") of a number " << same.w[0] << " expected " << expected;
    }
  }
}

TEST(CustomRule, PowersAreThoseOfTheStandard) {
  const float kBases[] = {0.0f, 0.5f, 1.0f, 3.0f, -0.5f, -2.0f, kInfinity, -kInfinity, kNaN};
  const float kExponents[] = {0.0f, 0.5f, 1.0f, 2.0f, 3.0f, -1.0f, -0.7f, 1e30f, kInfinity, kNaN};
  for (const float base : kBases) {
    for (const float exponent : kExponents) {
      const RowValues row =
          After(testing::Custom("w = pow(g, w)"), {std::vector<float>(8, exponent), {}},
                std::vector<float>(8, base));
      const float expected = std::pow(base, exponent);
      EXPECT_TRUE(Same(row.w[0], expected) ||
                  std::abs(row.w[0] - expected) <= std::abs(expected) * 0x1p-23f)
          << base << "^" << exponent << " " << row.w[0] << " expected " << expected;
    }
  }
}

// Unlike a built-in optimizer, whose quotient by a root of 0 counts as 0.
TEST(CustomRule, DividesByZeroAsIeeeDoes) {
  const RowValues row = After(testing::Custom("w = g / (w - w)"), {std::vector<float>(8, 1), {}},
                              {1, -1, 0, 1, 1, 1, 1, 1});
  EXPECT_EQ(row.w[0], kInfinity);
  EXPECT_EQ(row.w[1], -kInfinity);
  EXPECT_TRUE(std::isnan(row.w[2]));
}

TEST(CustomRule, WhatIsMadeOfNaNIsNaN) {
  for (const char* function : {"min(g, w)", "min(w, g)", "max(g, w)", "max(w, g)", "sign(g)",
                               "where(g != g, g, w)", "where(g == g, w, g)"}) {
    const RowValues row = After(testing::Custom(absl::StrCat("w = ", function)),
                                {std::vector<float>(8, 1), {}}, std::vector<float>(8, kNaN));
    EXPECT_TRUE(std::isnan(row.w[0])) << function;
  }
}

// The updated values are all made of the old ones, as far as no statement says otherwise.
TEST(CustomRule, SlotsMaySwap) {
  const RowValues row = After(
      testing::Custom("t = w; w = a; a = b; b = c; c = d; d = t",
                      "slots { name: 'a' } slots { name: 'b' } slots { name: 'c' } slots { name: "
                      "'d' }"),
      {std::vector<float>(8, 1),
       {std::vector<float>(8, 2), std::vector<float>(8, 3), std::vector<float>(8, 4),
        std::vector<float>(8, 5)}},
      std::vector<float>(8));
  EXPECT_EQ(row.w[0], 2);
  EXPECT_EQ(row.slots[0][0], 3);
  EXPECT_EQ(row.slots[1][0], 4);
  EXPECT_EQ(row.slots[2][0], 5);
  EXPECT_EQ(row.slots[3][0], 1);
}

// A number of the config in double, as TensorFlow's 1 - 0.999 is; StableHLO's in float32.
TEST(CustomRule, NumbersMeetInDoubleInAnExpression) {
  const std::vector<float> zeros(8);
  EXPECT_EQ(After(testing::Custom("w = g + (1 - 0.999)"), {zeros, {}}, zeros).w[0], 0.001f);
  EXPECT_EQ(After(testing::Custom("w = g + (1 - k)", "hyper_parameters { name: 'k' value: 0.999 }"),
                  {zeros, {}}, zeros)
                .w[0],
            1 - 0.999f);
  EXPECT_EQ(After("custom { stablehlo: 'func.func @main(%g: tensor<f32>, %w: tensor<f32>, %r: "
                  "tensor<f32>) -> tensor<f32> {\\n"
                  "%1 = stablehlo.constant dense<1.0> : tensor<f32>\\n"
                  "%2 = stablehlo.constant dense<9.990000e-01> : tensor<f32>\\n"
                  "%3 = stablehlo.subtract %1, %2 : tensor<f32>\\n"
                  "%4 = stablehlo.add %3, %g : tensor<f32>\\n"
                  "return %4 : tensor<f32>\\n}' }",
                  {zeros, {}}, zeros)
                .w[0],
            1 - 0.999f);
}

// What JAX 0.10 writes of jnp.where, jnp.clip, square, comparisons and truths, in functions of
// their own where it does so.
constexpr char kLowered[] = R"(module @jit_f attributes {mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<1x8xf32>, %arg1: tensor<1x8xf32>, %arg2: tensor<1x8xf32>, %arg3: tensor<1x8xf32>) -> (tensor<1x8xf32> {jax.result_info = "result[0]"}, tensor<1x8xf32> {jax.result_info = "result[1]"}) {
    %0 = chlo.square %arg0 : tensor<1x8xf32> -> tensor<1x8xf32>
    %1 = stablehlo.add %arg2, %0 : tensor<1x8xf32>
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %2 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<1x8xf32>
    %3 = stablehlo.compare  GT, %arg0, %2,  FLOAT : (tensor<1x8xf32>, tensor<1x8xf32>) -> tensor<1x8xi1>
    %4 = stablehlo.not %3 : tensor<1x8xi1>
    %5 = call @_where(%4, %arg1, %cst) : (tensor<1x8xi1>, tensor<1x8xf32>, tensor<f32>) -> tensor<1x8xf32>
    %c = stablehlo.constant dense<-1> : tensor<i32>
    %c_1 = stablehlo.constant dense<1> : tensor<i32>
    %6 = call @clip(%5, %c, %c_1) : (tensor<1x8xf32>, tensor<i32>, tensor<i32>) -> tensor<1x8xf32>
    %7 = stablehlo.convert %3 : (tensor<1x8xi1>) -> tensor<1x8xf32>
    %8 = stablehlo.multiply %7, %arg3 : tensor<1x8xf32>
    %9 = stablehlo.subtract %6, %8 : tensor<1x8xf32>
    return %9, %1 : tensor<1x8xf32>, tensor<1x8xf32>
  }
  func.func private @_where(%arg0: tensor<1x8xi1>, %arg1: tensor<1x8xf32>, %arg2: tensor<f32>) -> tensor<1x8xf32> {
    %0 = stablehlo.broadcast_in_dim %arg2, dims = [] : (tensor<f32>) -> tensor<1x8xf32>
    %1 = stablehlo.select %arg0, %arg1, %0 : tensor<1x8xi1>, tensor<1x8xf32>
    return %1 : tensor<1x8xf32>
  }
  func.func private @clip(%arg0: tensor<1x8xf32>, %arg1: tensor<i32>, %arg2: tensor<i32>) -> tensor<1x8xf32> {
    %0 = stablehlo.convert %arg1 : (tensor<i32>) -> tensor<f32>
    %1 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> tensor<1x8xf32>
    %2 = stablehlo.maximum %1, %arg0 : tensor<1x8xf32>
    %3 = stablehlo.convert %arg2 : (tensor<i32>) -> tensor<f32>
    %4 = stablehlo.broadcast_in_dim %3, dims = [] : (tensor<f32>) -> tensor<1x8xf32>
    %5 = stablehlo.minimum %4, %2 : tensor<1x8xf32>
    return %5 : tensor<1x8xf32>
  }
}
)";

TEST(CustomRule, StableHloIsTheExpressionThatItSays) {
  v1::OptimizerConfig lowered = testing::CompleteOptimizer(
      testing::Custom("w = g", "slots { name: 'a' }") + " learning_rate: 0.125");
  v1::OptimizerConfig typed = lowered;
  lowered.mutable_custom()->clear_expression();
  lowered.mutable_custom()->set_stablehlo(kLowered);
  typed.mutable_custom()->set_expression(
      "a = a + g * g; w = max(min(where(g > 0, 0, w), 1), -1) - (g > 0) * lr");
  std::mt19937_64 random(TestSeed());
  std::normal_distribution<float> normal;
  RowValues row{std::vector<float>(128), {std::vector<float>(128)}};
  std::vector<float> g(128);
  for (size_t c = 0; c < 128; ++c) g[c] = normal(random), row.w[c] = 2 * normal(random);
  RowValues other = row;
  testing::KernelUpdate(MakeStepRule(lowered, 0), g, row);
  testing::KernelUpdate(MakeStepRule(typed, 0), g, other);
  EXPECT_EQ(row.w, other.w);
  EXPECT_EQ(row.slots, other.slots);
  EXPECT_NE(row.w, std::vector<float>(128));
}

}  // namespace custom_rule_test
}  // namespace emberd::shard
