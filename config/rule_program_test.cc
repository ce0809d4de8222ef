#include "config/rule_program.h"

#include <string>

#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "config/optimizers.h"

namespace emberd::config {
namespace rule_program_test {

// With a slot `a` and a hyper-parameter `k`.
v1::CustomConfig Rule(const std::string& expression) {
  v1::CustomConfig custom;
  custom.set_expression(expression);
  custom.add_slots()->set_name("a");
  custom.add_hyper_parameters()->set_name("k");
  return custom;
}

// What stands between the braces of a function of gradient, weight, slot, rate and k.
v1::CustomConfig Function(const std::string& body, const std::string& more = "") {
  v1::CustomConfig custom = Rule("");
  custom.set_stablehlo(
      "module @jit_f attributes {mhlo.num_partitions = 1 : i32} {\n"
      "  func.func public @main(%arg0: tensor<8xf32>, %arg1: tensor<8xf32>, %arg2: tensor<8xf32>, "
      "%arg3: tensor<f32>, %arg4: tensor<f32>) -> (tensor<8xf32> {jax.result_info = \"\"}) {\n" +
      body + "\n  }\n" + more + "}\n");
  return custom;
}

std::string FaultOf(const v1::CustomConfig& custom) {
  const absl::Status status = CheckCustom(custom, "custom");
  return status.ok() ? "" : std::string(status.message());
}

struct BadRule {
  const char* text;
  const char* fault;  // the beginning, after the form
};

const BadRule kBadExpressions[] = {
    {"w = w - lr * gg",
     "line 1, column 14: expected a number, a name or \"(\", not \"gg\"; did you mean \"g\"? Known "
     "names: a, g, k, lr, step, w, abs, sign, sqrt, rsqrt, exp, log, tanh, floor, min, max, pow, "
     "where"},
    {"w = w - lr *",
     "line 1, column 13: expected a number, a name or \"(\", not the end of the statement"},
    {"w = w\n\n  a = b", "line 3, column 7: expected a number, a name or \"(\", not \"b\""},
    {"a = a + g * g", "line 1, column 14: expected that w is set, as in w = w - lr * g, not"},
    {"g = 0; w = 1",
     "line 1, column 1: expected w, a slot or a name of your own to set, as in w = w - lr * g, not "
     "\"g\""},
    {"w = 1; lr = 2", "line 1, column 8: expected w, a slot or a name of your own to set"},
    {"w = 1; k = 2", "line 1, column 8: expected w, a slot or a name of your own to set"},
    {"w = 1; step = 2", "line 1, column 8: expected w, a slot or a name of your own to set"},
    {"w = 1; sqrt = 2", "line 1, column 8: expected w, a slot or a name of your own to set"},
    {"3 = w", "line 1, column 1: expected w, a slot or a name of your own to set"},
    {"w + 1", "line 1, column 3: expected \"=\", not \"+\""},
    {"w -= lr * g", "line 1, column 3: expected \"=\", not \"-=\""},
    {"w = (g", "line 1, column 7: expected \")\", not the end of the statement"},
    {"w = g)", "line 1, column 6: expected an operator or the end of the statement, not \")\""},
    {"w = 2 g", "line 1, column 7: expected an operator or the end of the statement, not \"g\""},
    {"w = g ** 2", "line 1, column 8: expected a number, a name or \"(\", not \"*\""},
    {"w = g ^ 2", "line 1, column 7: expected an operator or the end of the statement, not \"^\""},
    {"w = sqrt g", "line 1, column 10: expected \"(\", not \"g\""},
    {"w = sqrt(g, w)", "line 1, column 5: sqrt takes 1 values, not 2"},
    {"w = where(g, w)", "line 1, column 5: where takes 3 values, not 2"},
    {"w = pow(g 2)", "line 1, column 11: expected \")\", not \"2\""},
    {"w = 0 < g < 1", "line 1, column 11: expected parentheses around a comparison, not \"<\""},
    {"w = \"g", "line 1, column 5: expected a number, a name or \"(\""},
    {"w = \xc3\xa9", "line 1, column 5: expected a number, a name or \"(\""},
    {"w = w + 1e400", "line 1, column 9: expected a number below 1.8e308, not \"1e400\""},
    {"w = g; // none\nw = @g", "line 2, column 5: expected a number, a name or \"(\", not \"@g\""},
};

TEST(CompileRule, NamesThePlaceOfAFaultInAnExpression) {
  for (const BadRule& bad : kBadExpressions) {
    const std::string expected = absl::StrCat("custom: expression: ", bad.fault);
    EXPECT_EQ(FaultOf(Rule(bad.text)).substr(0, expected.size()), expected) << bad.text;
  }
}

TEST(CompileRule, TakesEveryPartOfAnExpression) {
  for (const char* good :
       {"w = w - lr * g", "w = g;", "\n\n w=g // that is all", "u = 1\nw = u;; a = u",
        "w = -g - -w + +a * (g / w)", "w = 1e-3 * 2. + 0.5 + 1E+2", "w = (g > 0) + (g >= w)",
        "w = where(g != 0, abs(g), sign(w)) * (g == w) * (g < w) * (g <= w)",
        "w = max(min(sqrt(g), rsqrt(w)), exp(log(tanh(floor(pow(g, k))))))", "w = step",
        "w = w; w = g", "_x1 = g; w = _x1"}) {
    EXPECT_EQ(FaultOf(Rule(good)), "") << good;
  }
}

const BadRule kBadFunctions[] = {
    {"%0 = stablehlo.add %arg0 : tensor<8xf32>\nreturn %0, %0 : x",
     "line 3, column 6: stablehlo.add takes 2 values, not 1"},
    {"%0 = stablehlo.add %arg0, %9 : tensor<8xf32>",
     "line 3, column 27: expected the name of a value before it, not \"%9\""},
    {"%0 = stablehlo.cosine %arg0 : tensor<8xf32>",
     "line 3, column 6: expected an elementwise operation of StableHLO on f32, not "
     "\"stablehlo.cosine\""},
    {"%0 = stablehlo.reduce(%arg0 init: %arg3) across dimensions = [0] : tensor<8xf32>",
     "line 3, column 6: expected an elementwise operation"},
    {"%0 = stablehlo.add %arg0, %arg1 : tensor<8xf64>",
     "line 3, column 43: expected elements of f32, not \"xf64\""},
    {"%0 = stablehlo.add %arg0, %arg1 : tensor<8xbf16>", "line 3, column 43: expected elements"},
    {"%0 = stablehlo.add %arg0, %arg1 : tensor<i32>", "line 3, column 42: expected elements"},
    {"%0 = stablehlo.convert %arg0 : (tensor<8xf32>) -> tensor<8xi32>",
     "line 3, column 6: expected a conversion to f32"},
    {"%0 = stablehlo.constant dense<[1.0, 2.0]> : tensor<2xf32>",
     "line 3, column 25: expected one number for all elements, as dense<1.5>"},
    {"%0 = stablehlo.compare FLOAT, %arg0, %arg1 : tensor<8xf32>",
     "line 3, column 6: expected an elementwise operation"},
    {"%0 = call @other(%arg0) : tensor<8xf32>",
     "line 3, column 6: expected one of at most 256 calls, of functions of the text"},
    {"%0 = func.call @main(%arg0, %arg1, %arg2, %arg3, %arg4) : x",
     "line 3, column 6: expected one of at most 256 calls"},
    {"%0 = call @two(%arg0) : x", "line 5, column 19: the function takes 2 values, not 1"},
    {"%0:2 = call @two(%arg0, %arg1) : x\nreturn %0#2, %arg2 : x",
     "line 4, column 8: expected the name of a value before it, not \"%0#2\""},
    {"stablehlo.add %arg0, %arg1", "line 3, column 1: expected %name = operation, or return"},
    {"%0 =", "line 3, column 1: expected %name = operation, or return"},
    {"", "line 4, column 3: expected %name = operation, or return, not \"}\""},
    {"return %arg0 : tensor<8xf32>",
     "line 2, column 20: the function returns 1 values, not 2: weight, slots"},
};

TEST(CompileRule, NamesThePlaceOfAFaultInStableHlo) {
  for (const BadRule& bad : kBadFunctions) {
    const std::string expected = absl::StrCat("custom: stablehlo: ", bad.fault);
    EXPECT_EQ(FaultOf(Function(bad.text,
                               "func.func private @two(%x: tensor<f32>, %y: tensor<f32>) "
                               "-> x {\nreturn %x, %y : x\n}\n"))
                  .substr(0, expected.size()),
              expected)
        << bad.text;
  }
}

TEST(CompileRule, WantsTheArgumentsOfTheConfig) {
  v1::CustomConfig custom = Function("return %arg1, %arg2 : x");
  EXPECT_EQ(FaultOf(custom), "");
  custom.clear_hyper_parameters();
  EXPECT_EQ(FaultOf(custom),
            "custom: stablehlo: line 2, column 20: the function takes 5 values, not 4: gradient, "
            "weight, slots, learning rate, hyper-parameters");
  custom.set_stablehlo("module {}");
  EXPECT_EQ(FaultOf(custom),
            "custom: stablehlo: line 1, column 1: expected a function, as func.func @main(, not "
            "\"module\"");
}

TEST(CompileRule, TakesBothFormsOfOperations) {
  EXPECT_EQ(FaultOf(Function(R"(
    %cst = stablehlo.constant dense<-1.500000e+00> : tensor<f32>
    %inf = stablehlo.constant dense<0x7F800000> : tensor<f32>
    %c = stablehlo.constant dense<-1> : tensor<i32>
    %c_0 = stablehlo.constant dense<true> : tensor<i1>
    %0 = stablehlo.convert %c : (tensor<i32>) -> tensor<f32>
    %1 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %2 = "stablehlo.multiply"(%1, %arg0) : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32>
    %3 = stablehlo.compare  GT, %2, %1,  FLOAT : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xi1>
    %4 = "stablehlo.compare"(%2, %1) <{comparison_direction = #stablehlo<comparison_direction LE>, compare_type = #stablehlo<comparison_type FLOAT>}> : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xi1>
    %5 = stablehlo.and %3, %4 : tensor<8xi1>
    %6 = stablehlo.not %5 : tensor<8xi1>
    %7 = stablehlo.select %6, %2, %1 : tensor<8xi1>, tensor<8xf32>
    %8 = stablehlo.clamp %cst, %7, %inf : (tensor<f32>, tensor<8xf32>, tensor<f32>) -> tensor<8xf32>
    %9 = chlo.square %8 : tensor<8xf32> -> tensor<8xf32>
    %10:2 = call @swap(%9, %arg2) : (tensor<8xf32>, tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>)
    "func.return"(%10#1, %10#0) : (tensor<8xf32>, tensor<8xf32>) -> ())",
                             "func.func private @swap(%arg0: x, %arg1: x) -> (x, x) {\n"
                             "return %arg1, %arg0 : x, x\n}\n")),
            "");
}

TEST(CheckCustom, WantsOneRuleOfASizeThatCanBeRun) {
  EXPECT_EQ(FaultOf(Rule("")),
            "custom: a rule of 0 bytes is not allowed; it must be one of expression and stablehlo, "
            "of at most 65536");
  v1::CustomConfig both = Rule("w = g");
  both.set_stablehlo("module {}");
  EXPECT_EQ(FaultOf(both),
            "custom: a rule of 14 bytes is not allowed; it must be one of expression and "
            "stablehlo, of at most 65536");
  EXPECT_EQ(FaultOf(Rule("w = g //" + std::string(65536, '/'))).substr(0, 27),
            "custom: a rule of 65544 byt");
  std::string sum = "w = g";
  for (int i = 0; i < 600; ++i) sum += " + g";
  EXPECT_EQ(FaultOf(Rule(sum)),
            "custom: expression: line 1, column 2406: the rule has 600 operations and numbers; it "
            "may have 512");
  // What a rule is given, and slots that it leaves as they are, do not count.
  EXPECT_EQ(FaultOf(Rule(sum.substr(0, 5 + 4 * 512))), "");
  EXPECT_EQ(FaultOf(Rule(sum.substr(0, 5 + 4 * 513))),
            "custom: expression: line 1, column 2058: the rule has 513 operations and numbers; it "
            "may have 512");
  EXPECT_EQ(FaultOf(Rule("w = " + std::string(5000, '('))),
            "custom: expression: line 1, column 105: more than 100 signs and parentheses");
  EXPECT_EQ(FaultOf(Rule("w = " + std::string(5000, '-'))),
            "custom: expression: line 1, column 105: more than 100 signs and parentheses");
}

// 256 calls of what fits into 64 KiB would be a million operations.
TEST(CompileRule, CountsWhatIsCalledAgainAndAgain) {
  std::string calls, adds;
  for (int i = 0; i < 20; ++i) absl::StrAppend(&calls, "%", i, " = call @many(%arg0) : x\n");
  for (int i = 0; i < 100; ++i) absl::StrAppend(&adds, "%", i, " = stablehlo.add %x, %x : x\n");
  EXPECT_EQ(
      FaultOf(Function(calls + "return %19, %19 : x",
                       "func.func private @many(%x: x) -> x {\n" + adds + "return %99 : x\n}\n")),
      "custom: stablehlo: line 38, column 1: the rule has 513 operations and numbers; it may "
      "have 512");
}

TEST(CheckCustom, WantsNamesThatTheRuleCanUse) {
  const std::string allowed =
      " is not allowed; it must be 1 to 128 characters of [A-Za-z0-9_], the first no digit, and no "
      "name that the rule, a function, OptimizerConfig or a file of checkpoints has already";
  for (const char* name : {"", "1a", "a-b", "a.b", "g", "w", "lr", "step", "sqrt", "learning_rate",
                           "clip_weight_min", "weights", "k"}) {
    v1::CustomConfig custom = Rule("w = g");
    custom.mutable_slots(0)->set_name(name);
    EXPECT_EQ(FaultOf(custom),
              absl::StrCat("custom.", std::string(name) == "k" ? "hyper_parameters" : "slots",
                           "[0].name: \"", name, "\"", allowed));
  }
  v1::CustomConfig other = Rule("w = g");
  other.mutable_hyper_parameters(0)->set_name("weights");
  EXPECT_EQ(FaultOf(other), "");
  v1::CustomConfig many = Rule("w = g");
  for (const char* name : {"b", "c", "d", "e"}) many.add_slots()->set_name(name);
  EXPECT_EQ(FaultOf(many), "custom.slots[4]: one more is not allowed; it must be one of at most 4");
  many = Rule("w = g");
  for (int i = 0; i < 16; ++i) many.add_hyper_parameters()->set_name(absl::StrCat("h", i));
  EXPECT_EQ(FaultOf(many),
            "custom.hyper_parameters[16]: one more is not allowed; it must be one of at most 16");
}

TEST(RuleUsesStep, IsAboutTheNameAlone) {
  EXPECT_TRUE(RuleUsesStep(Rule("w = g / (step + 1)")));
  EXPECT_FALSE(RuleUsesStep(Rule("steps = g; w = steps // step")));
  EXPECT_FALSE(RuleUsesStep(Function("return %arg1, %arg2 : x")));
}

}  // namespace rule_program_test
}  // namespace emberd::config
