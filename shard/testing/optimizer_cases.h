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
  std::string text;  // of an OptimizerConfig
  double bound;      // of rules.h, in units of 2^-24
};

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
  };
  return *kCases;
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
