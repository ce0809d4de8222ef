// Every optimizer, with the options that change its formula.
#pragma once

#include <string>
#include <vector>

#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include "config/config.h"
#include "emberd/v1/model.pb.h"

namespace emberd::shard::testing {

struct OptimizerCase {
  std::string name;
  std::string text;     // of an OptimizerConfig
  double bound;         // of rules.h, in units of 2^-24
  std::string as = "";  // the built-in optimizer that it is, if it is a custom one
};

// Adagrad as JAX writes it.
inline std::string CustomStableHloAdagrad() {
  return R"pb(custom {
                stablehlo: "module @jit_adagrad {\n"
                           "  func.func public @main(%arg0: tensor<1x8xf32>, %arg1: "
                           "tensor<1x8xf32>, %arg2: tensor<1x8xf32>, %arg3: tensor<f32>) -> "
                           "(tensor<1x8xf32>, tensor<1x8xf32>) {\n"
                           "    %0 = stablehlo.multiply %arg0, %arg0 : tensor<1x8xf32>\n"
                           "    %1 = stablehlo.add %arg2, %0 : tensor<1x8xf32>\n"
                           "    %2 = stablehlo.broadcast_in_dim %arg3, dims = [] : (tensor<f32>) "
                           "-> tensor<1x8xf32>\n"
                           "    %3 = stablehlo.multiply %2, %arg0 : tensor<1x8xf32>\n"
                           "    %4 = stablehlo.sqrt %1 : tensor<1x8xf32>\n"
                           "    %5 = stablehlo.divide %3, %4 : tensor<1x8xf32>\n"
                           "    %6 = stablehlo.subtract %arg1, %5 : tensor<1x8xf32>\n"
                           "    return %6, %1 : tensor<1x8xf32>, tensor<1x8xf32>\n"
                           "  }\n"
                           "}\n"
                slots { name: "accumulator" initial_value: 0.1 }
              })pb";
}

// A custom optimizer of this rule.
inline std::string Custom(const std::string& expression, const std::string& rest = "") {
  return "custom { expression: '" + expression + "' " + rest + " }";
}

inline const std::vector<OptimizerCase>& OptimizerCases() {
  static const auto* const kCases = new std::vector<OptimizerCase>{
      {"Sgd", "sgd {}", 2},
      {"SgdClipDecay",
       "sgd {} clip_gradient_min: -0.5 clip_gradient_max: 0.75 weight_decay_factor: 0.01 "
       "clip_weight_min: -0.9 clip_weight_max: 0.8",
       4},
      {"SgdDecayByRate",
       "sgd {} weight_decay_factor: 0.1 multiply_weight_decay_factor_by_learning_rate: true", 4},
      {"Momentum", "momentum { momentum: 0.8 }", 4},
      {"Nesterov", "momentum { use_nesterov: true }", 4},
      {"Adagrad", "adagrad {}", 4},
      {"RowwiseAdagrad", "rowwise_adagrad { initial_accumulator: 0.1 }", 6.5},
      {"RowwiseAdagradClip",
       "rowwise_adagrad { initial_accumulator: 0.1 } clip_gradient_min: 0.1 "
       "clip_gradient_max: 0.75",
       8.5},
      {"AdagradMomentum", "adagrad_momentum {}", 6},
      {"AdagradMomentumRoot3",
       "adagrad_momentum { beta2: 0.9 exponent: 3 epsilon: 0.1 use_nesterov: true }", 6},
      {"Adam", "adam {}", 6},
      {"AdamSumOutside", "adam { sum_inside_sqrt: false }", 6},
      {"AdamCorrected", "adam { bias_correction: true }", 6},
      {"AdamW", "adamw { weight_decay: 0.1 }", 6},
      {"Ftrl", "ftrl {}", 6},
      {"FtrlAll", "ftrl { learning_rate_power: -0.7 l1: 0.05 l2: 0.02 beta: 0.1 }", 6},
      {"FtrlMultiplied",
       "ftrl { l1: 0.05 l2: 0.02 beta: 0.1 multiply_linear_by_learning_rate: true }", 6},
      {"LaProp", "laprop {}", 14},
      {"F2a", "f2a { rho: 0.7 l1: 0.01 l2: 0.02 max_lr_multiplier: 1.5 }", 6},
      {"RmsProp", "rmsprop { momentum: 0.5 }", 6},
      {"CustomSgd",
       Custom("w = w - lr * g") +
           " clip_gradient_min: -0.5 clip_gradient_max: 0.75 weight_decay_factor: 0.01 "
           "clip_weight_min: -0.9 clip_weight_max: 0.8",
       4,
       "sgd {} clip_gradient_min: -0.5 clip_gradient_max: 0.75 weight_decay_factor: 0.01 "
       "clip_weight_min: -0.9 clip_weight_max: 0.8"},
      {"CustomNesterov",
       Custom("m = k * m + g; w = w - lr * (k * m + g)",
              "slots { name: 'm' } hyper_parameters { name: 'k' value: 0.9 }"),
       4, "momentum { use_nesterov: true }"},
      {"CustomAdagrad",
       Custom("a = a + g * g; w = w - lr * g / sqrt(a)", "slots { name: 'a' initial_value: 0.1 }"),
       4, "adagrad {}"},
      {"CustomStableHlo", CustomStableHloAdagrad(), 4, "adagrad {}"},
      {"CustomAdagradMomentum",
       Custom(
           "a = 0.9 * a + (1 - 0.9) * (g * g); u = g * pow(a + e, -1 / 3) ; m = k * m + u;"
           "w = w - lr * (k * m + u)",
           "slots { name: 'a' initial_value: 0.1 } slots { name: 'm' }"
           "hyper_parameters { name: 'k' value: 0.9 } hyper_parameters { name: 'e' value: 0.1 }"),
       6, "adagrad_momentum { beta2: 0.9 exponent: 3 epsilon: 0.1 use_nesterov: true }"},
      {"CustomAdam",
       Custom("m = m + (1 - 0.9) * (g - m); v = v + (1 - 0.999) * (g * g - v);"
              "w = w - lr * m / sqrt(v + e * e)",
              "slots { name: 'm' } slots { name: 'v' }"
              "hyper_parameters { name: 'e' value: 1e-7 }"),
       6, "adam {}"},
      {"CustomAdamCorrected",
       Custom("m = m + (1 - b1) * (g - m)\\n v = v + (1 - b2) * (g * g - v)\\n"
              "c = sqrt(1 - pow(b2, step + 1))  // of both moments\\n"
              "w = w - lr * c / (1 - pow(b1, step + 1)) * m / (sqrt(v) + e * c)",
              "slots { name: 'm' } slots { name: 'v' }"
              "hyper_parameters { name: 'b1' value: 0.9 } hyper_parameters { name: 'b2' value: "
              "0.999 } hyper_parameters { name: 'e' value: 1e-8 }"),
       6, "adam { bias_correction: true }"},
      {"CustomFtrl",
       Custom("old = pow(a, 0.7); a = a + g * g; p = pow(a, 0.7); l = l + g - (p - old) * w / lr;"
              "w = (min(max(l, -l1), l1) - l) / ((p + beta) / lr + 2 * l2)",
              "slots { name: 'a' initial_value: 0.1 } slots { name: 'l' }"
              "hyper_parameters { name: 'l1' value: 0.05 } hyper_parameters { name: 'l2' value: "
              "0.02 } hyper_parameters { name: 'beta' value: 0.1 }"),
       6, "ftrl { learning_rate_power: -0.7 l1: 0.05 l2: 0.02 beta: 0.1 }"},
      {"CustomLaProp",
       Custom("d = b2 * (1 - pow(b2, step)) / (1 - pow(b2, step + 1));"
              "nu = d * nu + (1 - d) * (g * g + 1e-30);"
              "mu = b1 * mu + sqrt(1 - b1 * b1) * g / sqrt(nu); w = w - lr * mu",
              "slots { name: 'mu' } slots { name: 'nu' }"
              "hyper_parameters { name: 'b1' value: 0.9 } hyper_parameters { name: 'b2' value: "
              "0.95 }"),
       14, "laprop {}"},
      {"CustomRmsProp",
       Custom("v = v + (1 - 0.9) * (g * g - v); m = 0.5 * m + lr * g / sqrt(v + e); w = w - m",
              "slots { name: 'v' } slots { name: 'm' } hyper_parameters { name: 'e' value: 1e-7 "
              "}"),
       6, "rmsprop { momentum: 0.5 }"},
  };
  return *kCases;
}

// Of the optimizer whose formula ExactUpdate has.
inline const std::string& FormulaOf(const OptimizerCase& optimizer) {
  return optimizer.as.empty() ? optimizer.text : optimizer.as;
}

// Parses and fills in all defaults, as a declared model would have them.
inline v1::OptimizerConfig CompleteOptimizer(const std::string& text) {
  v1::ModelConfig model;
  model.set_name("model");
  v1::TableConfig* table = model.add_tables();
  table->set_name("table");
  table->set_vocabulary_size(8);
  table->set_embedding_dim(8);
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, table->mutable_optimizer()))
      << text;
  v1::FeatureConfig* feature = model.add_features();
  feature->set_name("feature");
  feature->set_table("table");
  const absl::Status status = config::CompleteModel(&model);
  EXPECT_TRUE(status.ok()) << status;
  return model.tables(0).optimizer();
}

}  // namespace emberd::shard::testing
